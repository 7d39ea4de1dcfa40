// Vectors of sixteen lanes against the compiler's own numbers. Compiled for each instruction set.
#include "simd.h"

#include <cmath>

#include "check.h"
#include "kernels/transpose.h"

#define QUIRE_TEXT_OF(name) #name
#define QUIRE_TEXT(name) QUIRE_TEXT_OF(name)

using namespace quire;
using namespace quire::QUIRE_ISA;

template <class To, class From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The bits of `got` are those of `wanted`, or both are NaN.
void check_float(float got, float wanted, const char* what, uint32_t from) {
  const bool is_same = bits_of<uint32_t>(got) == bits_of<uint32_t>(wanted) || (std::isnan(got) && std::isnan(wanted));
  CHECK(is_same, "%s of %08x: %.9g, not %.9g", what, from, got, wanted);
}

void check_loads() {
  for (uint32_t first = 0; first < 1 << 16; first += kLanes) {
    fp16 halves[kLanes];
    bf16 brains[kLanes];
    for (uint32_t i = 0; i < kLanes; ++i) {
      halves[i].number = bits_of<half>(static_cast<uint16_t>(first + i));
      brains[i].bits = static_cast<uint16_t>(first + i);
    }
    const f32x16 from_halves = load(halves), from_brains = load(brains);
    for (int i = 0; i < kLanes; ++i) {
      check_float(from_halves[i], static_cast<float>(halves[i].number), "fp16", first + i);
      check_float(from_brains[i], bits_of<float>((first + i) << 16), "bf16", first + i);
    }
  }
}

// One float in all lanes.
void check_stores_of(uint32_t bits) {
  const float number = bits_of<float>(bits);
  fp16 halves[kLanes];
  bf16 brains[kLanes];
  store(halves, splat(number));
  store(brains, splat(number));
  check_float(static_cast<float>(halves[bits % kLanes].number), static_cast<float>(static_cast<half>(number)), "to fp16", bits);
  const bool is_denormal = std::fpclassify(number) == FP_SUBNORMAL;  // which the instruction takes for zero
  if (!is_denormal) check_float(to_float(brains[bits % kLanes]), to_float(float_to_bf16(number)), "to bf16", bits);
}

void check_stores() {
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 4099) check_stores_of(static_cast<uint32_t>(bits));
  // Halfway between two numbers of 16 bits, and just beside.
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 1 << 12) {
    check_stores_of(static_cast<uint32_t>(bits));
    check_stores_of(static_cast<uint32_t>(bits) + 1);
    check_stores_of(static_cast<uint32_t>(bits) - 1);
  }
}

void check_bytes() {
  for (int first = -128; first < 128; first += kLanes) {
    int8_t bytes[kLanes];
    int32_t numbers[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      bytes[i] = static_cast<int8_t>(first + i);
      numbers[i] = (first + i) * 257;
    }
    const f32x16 loaded = load(bytes);
    const i8x16 low = low_bytes(load_bits<i32x16>(numbers));
    for (int i = 0; i < kLanes; ++i) {
      check_float(loaded[i], static_cast<float>(bytes[i]), "int8", i);
      CHECK(low[i] == bytes[i], "low byte of %d: %d", numbers[i], low[i]);
    }
  }
}

void check_lanes() {
  float numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = 1.0f / static_cast<float>(3 * i + 1);
  float tree[kLanes];
  std::memcpy(tree, numbers, sizeof tree);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) tree[i] += tree[i + width];
  }
  CHECK(sum_of_lanes(load(numbers)) == tree[0], "sum of lanes");
  for (int i = 0; i < kLanes; ++i) {
    numbers[i] = 2.0f;
    CHECK(max_of_lanes(load(numbers)) == 2.0f, "largest lane is %d", i);
    numbers[i] = -2.0f;
  }
  u32x16 rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = bits_as<u32x16>(load_bits<i32x16>(kLaneNumbers)) + 100 * i;
  transpose(rows);
  for (uint32_t i = 0; i < kLanes; ++i) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) CHECK(rows[i][lane] == 100 * lane + i, "row %u, lane %u", i, lane);
  }
}

// Not part of main(), which a CPU without the instructions must get through.
__attribute__((noinline)) void check_all() {
  check_loads();
  check_stores();
  check_bytes();
  check_lanes();
}

int main() {
  if (find_kernels(QUIRE_TEXT(QUIRE_ISA)) == nullptr) {
    std::printf("this CPU has no " QUIRE_TEXT(QUIRE_ISA) "\n");
    return 0;
  }
  check_all();
}
