// Products of pairs of bf16, summed in float32: the one way in which matrices and attention compute in bf16. Compiled once for
// each instruction set.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

// Two numbers that a row has next to each other.
QUIRE_INLINE uint32_t load_pair(const bf16* from) {
  uint32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}

// Adds the two products of `pair` with each lane's pair to the lane's sum.
QUIRE_INLINE void add_pair_products(f32x16& sum, uint32_t pair, u32x16 column) {
#if defined(__AVX512BF16__)
  sum = bits_as<f32x16>(
      _mm512_dpbf16_ps(bits_as<__m512>(sum), bits_as<__m512bh>(_mm512_set1_epi32(pair)), bits_as<__m512bh>(column)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  for_each_register(sum, column, [inputs = vreinterpretq_bf16_u32(vdupq_n_u32(pair))](auto& to, const auto& from) {
    to = bits_as<Vector<float, 4> >(vbfdotq_f32(bits_as<float32x4_t>(to), inputs, bits_as<bfloat16x8_t>(from)));
  });
#else
  const u32x16 inputs = broadcast<u32x16>(pair);
  sum += bits_as<f32x16>(inputs << 16) * bits_as<f32x16>(column << 16);
  sum += bits_as<f32x16>(inputs & 0xffff0000u) * bits_as<f32x16>(column & 0xffff0000u);
#endif
}

}  // namespace quire::QUIRE_ISA
