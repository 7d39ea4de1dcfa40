// What a test needs: a check that says where it failed, random numbers of every type, and every instruction set of this CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "dispatch.h"

#define CHECK(condition, ...)                                               \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::printf("%s:%d: not so: %s\n  ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                             \
      std::printf("\n");                                                    \
      std::exit(1);                                                         \
    }                                                                       \
  } while (false)

namespace quire::test {

inline std::mt19937& generator() {
  static std::mt19937 generator(20261121);
  return generator;
}

inline int64_t random_int(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator()); }

inline std::vector<float> random_floats(int64_t count, float deviation = 1.0f) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(generator());
  return numbers;
}

inline std::vector<bf16> to_bf16(const std::vector<float>& numbers) {
  std::vector<bf16> result;
  for (const float number : numbers) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    result.push_back({static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)});
  }
  return result;
}

inline float to_float(bf16 number) {
  const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// The types of tensors: how a number gets into one, what it is worth, and what a result in it may be off by, relative to its
// magnitude, after one rounding and some in float32.
template <class T>
T from_float(float number);
template <>
inline float from_float(float number) {
  return number;
}
template <>
inline bf16 from_float(float number) {
  return to_bf16({number})[0];
}
template <>
inline fp16 from_float(float number) {
  return {static_cast<half>(number)};
}

inline double number_of(float number) { return number; }
inline double number_of(bf16 number) { return to_float(number); }
inline double number_of(fp16 number) { return static_cast<float>(number.number); }
inline double number_of(int8_t number) { return number; }

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr DType dtype = DType::kFloat32;
  static constexpr double rounding = 3e-6;
};
template <>
struct TypeOf<bf16> {
  static constexpr DType dtype = DType::kBFloat16;
  static constexpr double rounding = 0x1p-7;
};
template <>
struct TypeOf<fp16> {
  static constexpr DType dtype = DType::kFloat16;
  static constexpr double rounding = 0x1p-10;
};
template <>
struct TypeOf<int8_t> {
  static constexpr DType dtype = DType::kInt8;
};

template <class T>
std::vector<T> random_numbers(int64_t count, float deviation = 1.0f) {
  std::vector<T> numbers;
  for (const float number : random_floats(count, deviation)) numbers.push_back(from_float<T>(number));
  return numbers;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> found;
  for (const char* name : {"portable", "avx2", "avx512", "avx512bf16", "amx", "dotprod", "i8mmbf16"}) {
    if (const Kernels* kernels = find_kernels(name)) found.push_back(kernels);
  }
  return found;
}

// Memory aligned as kernels want it, of exactly the size asked for, so that a sanitizer sees a step beyond it.
struct Aligned {
  explicit Aligned(int64_t bytes) : data(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {
    std::memset(data, 0xff, bytes);  // NaN as a float
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  char* data;
};

}  // namespace quire::test
