# The library of kernels: common parts, and each room once for each instruction set.

add_library(quire_kernels STATIC src/thread_pool.cpp src/context.cpp src/dispatch.cpp src/attention_plan.cpp src/experts.cpp src/sampling.cpp)
target_include_directories(quire_kernels PUBLIC src)
target_link_libraries(quire_kernels PUBLIC Threads::Threads)
# GCC 12 takes the undefined vectors of its own intrinsics for mistakes.
set(warnings -Wall -Wextra -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized)
target_compile_options(quire_kernels PRIVATE ${warnings})

set(rooms packing linear linear_groups linear_groups_int8 attention key_masses elementwise rotary recurrence sampling table)
# A set with a base has rooms of its own for some kernels, and takes the others from its base.
set(rooms_amx linear attention table)
set(base_amx avx512bf16)
# Portable comes first: should an inline function that all sets share have a copy in each, the linker keeps the first.
set(sets portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND sets avx2 avx512 avx512bf16 amx)
endif()
set(flags_portable)
set(flags_avx2 -mavx2 -mfma -mf16c)
set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512)
set(flags_avx512bf16 ${flags_avx512} -mavx512bf16)
set(flags_amx ${flags_avx512bf16} -mamx-tile -mamx-bf16 -mamx-int8)

foreach(set ${sets})
  set(base ${set})
  set(own_rooms ${rooms})
  if(base_${set})
    set(base ${base_${set}})
    set(own_rooms ${rooms_${set}})
  endif()
  set(sources)
  foreach(room ${own_rooms})
    list(APPEND sources src/kernels/${room}.cpp)
  endforeach()
  add_library(quire_${set} OBJECT ${sources})
  target_include_directories(quire_${set} PRIVATE src)
  target_compile_definitions(quire_${set} PRIVATE QUIRE_ISA=${set} QUIRE_BASE_ISA=${base})
  # Products and the sums that they are added to are rounded once, as Clang would do only within an expression.
  target_compile_options(quire_${set} PRIVATE ${flags_${set}} ${warnings} -fno-math-errno -ffp-contract=fast)
  target_link_libraries(quire_kernels PRIVATE $<TARGET_OBJECTS:quire_${set}>)
  target_compile_definitions(quire_kernels PRIVATE QUIRE_HAS_${set})
endforeach()
