// The number types of tensors, and what every kernel needs to say of one.
#pragma once

#include <cstdint>

namespace quire {

#if defined(__aarch64__)
using half = __fp16;  // GCC 12 has no _Float16 there
#elif defined(__FLT16_MANT_DIG__)
using half = _Float16;
#else
#error "a compiler with _Float16 is needed: GCC 12 or Clang 15"
#endif

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  half number;
};

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kUInt8 = 4, kInt4 = 5 };

constexpr int kLine = 64;  // bytes of a cache line

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

}  // namespace quire
