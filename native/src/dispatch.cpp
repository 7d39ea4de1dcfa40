#include "dispatch.h"

#include <cstring>

#if defined(QUIRE_HAS_amx)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace quire {

#if defined(QUIRE_HAS_amx)
namespace amx {
extern const Kernels kKernels;
}
#endif
#if defined(QUIRE_HAS_avx512bf16)
namespace avx512bf16 {
extern const Kernels kKernels;
}
#endif
#if defined(QUIRE_HAS_avx512)
namespace avx512 {
extern const Kernels kKernels;
}
#endif
#if defined(QUIRE_HAS_avx2)
namespace avx2 {
extern const Kernels kKernels;
}
#endif
#if defined(QUIRE_HAS_i8mmbf16)
namespace i8mmbf16 {
extern const Kernels kKernels;
}
#endif
#if defined(QUIRE_HAS_dotprod)
namespace dotprod {
extern const Kernels kKernels;
}
#endif
namespace portable {
extern const Kernels kKernels;
}

namespace {

struct Candidate {
  const Kernels* kernels;
  bool (*runs_here)();
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Linux gives the tile registers only to a process that asks for them, and to all of its threads.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
  return has_avx512bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("amx-int8") && may_use_tiles();
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }

bool has_i8mmbf16() {
  return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16");
}
#elif defined(__aarch64__)
bool has_dotprod() {
  constexpr unsigned long kDotProd = 1 << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProd) != 0;
}

bool has_i8mmbf16() {
  constexpr unsigned long kBoth = 1 << 13 | 1 << 14;  // HWCAP2_I8MM, HWCAP2_BF16
  return has_dotprod() && (getauxval(AT_HWCAP2) & kBoth) == kBoth;
}
#endif

// Best first.
const Candidate kCandidates[] = {
#if defined(QUIRE_HAS_amx)
    {&amx::kKernels, has_amx},
#endif
#if defined(QUIRE_HAS_avx512bf16)
    {&avx512bf16::kKernels, has_avx512bf16},
#endif
#if defined(QUIRE_HAS_avx512)
    {&avx512::kKernels, has_avx512},
#endif
#if defined(QUIRE_HAS_avx2)
    {&avx2::kKernels, has_avx2},
#endif
#if defined(QUIRE_HAS_i8mmbf16)
    {&i8mmbf16::kKernels, has_i8mmbf16},
#endif
#if defined(QUIRE_HAS_dotprod)
    {&dotprod::kKernels, has_dotprod},
#endif
    {&portable::kKernels, [] { return true; }},
};

}  // namespace

const Kernels* find_kernels(const char* instruction_set) {
  for (const Candidate& candidate : kCandidates) {
    if (std::strcmp(candidate.kernels->instruction_set, instruction_set) == 0) {
      return candidate.runs_here() ? candidate.kernels : nullptr;
    }
  }
  return nullptr;
}

const Kernels& best_kernels() {
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here()) return *candidate.kernels;
  }
  return portable::kKernels;
}

}  // namespace quire
