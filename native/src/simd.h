// Vectors of sixteen lanes on every instruction set: one register with AVX-512, two with AVX2, four with SSE or NEON. The
// lanes are the same everywhere, so that a kernel adds in the same order everywhere.
#pragma once

#include "types.h"
#include "vectors.h"

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16;

using f32x16 = Vector<float, kLanes>;
using i32x16 = Vector<int32_t, kLanes>;
using u32x16 = Vector<uint32_t, kLanes>;
using i8x16 = Vector<int8_t, kLanes>;
using u16x8 = Vector<uint16_t, 8>;

alignas(64) constexpr int32_t kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

QUIRE_INLINE f32x16 splat(float value) { return broadcast<f32x16>(value); }

#if defined(__AVX512F__)
// Of what `maximum` and `minimum` say, compilers make two instructions.
QUIRE_INLINE f32x16 maximum(f32x16 a, f32x16 b) { return bits_as<f32x16>(_mm512_max_ps(bits_as<__m512>(a), bits_as<__m512>(b))); }
QUIRE_INLINE f32x16 minimum(f32x16 a, f32x16 b) { return bits_as<f32x16>(_mm512_min_ps(bits_as<__m512>(a), bits_as<__m512>(b))); }
#endif

QUIRE_INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
QUIRE_INLINE constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

QUIRE_INLINE float bf16_to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Round to nearest, ties to even; a NaN stays one.
QUIRE_INLINE bf16 float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

QUIRE_INLINE float to_float(float value) { return value; }
QUIRE_INLINE float to_float(bf16 value) { return bf16_to_float(value); }
QUIRE_INLINE float to_float(fp16 value) { return static_cast<float>(value.number); }

template <class T>
QUIRE_INLINE T from_float(float value);
template <>
QUIRE_INLINE float from_float<float>(float value) {
  return value;
}
template <>
QUIRE_INLINE bf16 from_float<bf16>(float value) {
  return float_to_bf16(value);
}
template <>
QUIRE_INLINE fp16 from_float<fp16>(float value) {
  return {static_cast<half>(value)};
}

// -- 16-bit numbers in the low halves of lanes ---------------------------------------------------------------------------

// Compilers make several instructions of a conversion where there is one.
QUIRE_INLINE u32x16 load_wide(const void* from) {
#if defined(__AVX512F__)
  return bits_as<u32x16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  const __m128i* halves = static_cast<const __m128i*>(from);
  return {bits_as<HalfOf<u32x16> >(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves))),
          bits_as<HalfOf<u32x16> >(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)))};
#else
  using Half = HalfOf<u32x16>;
  const auto widen = [](u16x8 bits) {
    const u16x8 low = __builtin_shufflevector(bits, u16x8{}, 0, 8, 1, 9, 2, 10, 3, 11);
    const u16x8 high = __builtin_shufflevector(bits, u16x8{}, 4, 12, 5, 13, 6, 14, 7, 15);
    return Half{bits_as<HalfOf<Half> >(low), bits_as<HalfOf<Half> >(high)};
  };
  return {widen(load_bits<u16x8>(from)), widen(load_bits<u16x8>(static_cast<const char*>(from) + 16))};
#endif
}

// The high halves of lanes have to be zero.
QUIRE_INLINE void store_narrow(void* to, u32x16 wide) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(bits_as<__m512i>(wide)));
#elif defined(__AVX2__)
  const __m256i mixed = _mm256_packus_epi32(bits_as<__m256i>(wide.low), bits_as<__m256i>(wide.high));
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
#else
  const auto narrow = [](const HalfOf<u32x16>& half) {
    return __builtin_shufflevector(bits_as<u16x8>(half.low), bits_as<u16x8>(half.high), 0, 2, 4, 6, 8, 10, 12, 14);
  };
  store_bits(to, narrow(wide.low));
  store_bits(static_cast<char*>(to) + 16, narrow(wide.high));
#endif
}

// -- sixteen numbers of memory as floats, at any address ---------------------------------------------------------------

QUIRE_INLINE f32x16 load(const float* from) { return load_bits<f32x16>(from); }
QUIRE_INLINE f32x16 load(const bf16* from) { return bits_as<f32x16>(load_wide(from) << 16); }

QUIRE_INLINE f32x16 load(const fp16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  const __m128i* halves = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#elif defined(__aarch64__)
  const auto widen = [from](int first) { return bits_as<Vector<float, 4> >(vcvt_f32_f16(vld1_f16(&from->number + first))); };
  return {{widen(0), widen(4)}, {widen(8), widen(12)}};
#else
  // As a float whose exponent is too small by 112; the product makes that good, of denormal numbers too.
  const u32x16 bits = load_wide(from);
  const u32x16 magnitude = (bits & 0x7fff) << 13;
  const f32x16 finite = bits_as<f32x16>(magnitude) * 0x1p112f;
  const u32x16 exponent = select(magnitude >= 0x7c00u << 13, broadcast<u32x16>(0x7f800000), u32x16{});
  return bits_as<f32x16>(bits_as<u32x16>(finite) | exponent | (bits & 0x8000) << 16);
#endif
}

QUIRE_INLINE f32x16 load(const int8_t* from) {
#if defined(__AVX512F__)
  return bits_as<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
#else
  // Each byte four times, so that a shift leaves it with its sign.
  using Half = HalfOf<i32x16>;
  const i8x16 bytes = load_bits<i8x16>(from);
  const auto widen = [](i8x16 twice) {
    const u16x8 words = bits_as<u16x8>(twice);
    return Half{bits_as<HalfOf<Half> >(__builtin_shufflevector(words, words, 0, 0, 1, 1, 2, 2, 3, 3)),
                bits_as<HalfOf<Half> >(__builtin_shufflevector(words, words, 4, 4, 5, 5, 6, 6, 7, 7))};
  };
  const i8x16 low = __builtin_shufflevector(bytes, bytes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const i8x16 high = __builtin_shufflevector(bytes, bytes, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
  return convert<f32x16>(i32x16{widen(low), widen(high)} >> 24);
#endif
}

// The low 8 bits of each lane.
QUIRE_INLINE i8x16 low_bytes(i32x16 values) {
#if defined(__AVX512F__)
  return bits_as<i8x16>(_mm512_cvtepi32_epi8(bits_as<__m512i>(values)));
#else
  i8x16 words[2];
  store_narrow(words, bits_as<u32x16>(values & 0xff));
  return __builtin_shufflevector(words[0], words[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

QUIRE_INLINE void store(float* to, f32x16 values) { store_bits(to, values); }

QUIRE_INLINE void store(bf16* to, f32x16 values) {
#if defined(__AVX512BF16__)
  const auto rounded = _mm512_cvtneps_pbh(bits_as<__m512>(values));
  std::memcpy(to, &rounded, 32);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const auto narrow = [](const HalfOf<f32x16>& half) {
    return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(bits_as<float32x4_t>(half.low)), bits_as<float32x4_t>(half.high));
  };
  store_bits(to, narrow(values.low));
  store_bits(to + 8, narrow(values.high));
#else
  const u32x16 bits = bits_as<u32x16>(values);
  const u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32x16 not_a_number = bits >> 16 | 0x40;
  store_narrow(to, select(values != values, not_a_number, rounded));
#endif
}

QUIRE_INLINE void store(fp16* to, f32x16 values) {
#if defined(__AVX512F__)
  const __m256i rounded = _mm512_cvtps_ph(bits_as<__m512>(values), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &rounded, 32);
#elif defined(__F16C__)
  __m128i* halves = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(values.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(values.high, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  const auto narrow = [to](int first, const HalfOf<f32x16>& half) {
    vst1_f16(&to->number + first, vcvt_f16_f32(bits_as<float32x4_t>(half.low)));
    vst1_f16(&to->number + first + 4, vcvt_f16_f32(bits_as<float32x4_t>(half.high)));
  };
  narrow(0, values.low);
  narrow(8, values.high);
#else
  const u32x16 bits = bits_as<u32x16>(values);
  const u32x16 magnitude = bits & 0x7fffffff;
  const u32x16 normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  // 0.5 has the last place that denormal numbers have in 16 bits.
  const u32x16 denormal = bits_as<u32x16>(bits_as<f32x16>(magnitude) + 0.5f) - 0x3f000000;
  const u32x16 infinite = select(values != values, magnitude >> 13 | 0x7e00, broadcast<u32x16>(0x7c00));
  const u32x16 finite = select(magnitude < 113u << 23, denormal, normal);
  store_narrow(to, select(magnitude < 0x477ff000u, finite, infinite & 0x7fff) | (bits >> 16 & 0x8000));
#endif
}

// The first `count` (0 to 16) numbers, with `fill` in the other lanes.
template <class T>
QUIRE_INLINE f32x16 load_some(const T* from, int count, float fill = 0.0f) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = fill;
  for (int lane = 0; lane < count; ++lane) lanes[lane] = to_float(from[lane]);
  return load(lanes);
}

template <class T>
QUIRE_INLINE void store_some(T* to, f32x16 values, int count) {
  T whole[kLanes];
  store(whole, values);
  std::memcpy(to, whole, count * sizeof(T));
}

// -- across lanes, always as the same tree -----------------------------------------------------------------------------

template <class V>
QUIRE_INLINE float sum_of_lanes(V values) {
  if constexpr (kLanesOf<V> > 4) {
    return sum_of_lanes(low_half(values) + high_half(values));
  } else {
    return (values[0] + values[2]) + (values[1] + values[3]);
  }
}

template <class V>
QUIRE_INLINE float max_of_lanes(V values) {
  if constexpr (kLanesOf<V> > 4) {
    return max_of_lanes(maximum(low_half(values), high_half(values)));
  } else {
    const float even = values[0] > values[2] ? values[0] : values[2];
    const float odd = values[1] > values[3] ? values[1] : values[3];
    return even > odd ? even : odd;
  }
}

}  // namespace quire::QUIRE_ISA
