// exp, tanh, softplus and the normal distribution, of sixteen numbers. Coefficients are least-maximum fits made for these ranges.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

// Values times 2 to the power of whole numbers -160 to 160.
QUIRE_INLINE f32x16 times_power_of_two(f32x16 values, f32x16 powers) {
#if defined(__AVX512F__)
  return bits_as<f32x16>(_mm512_scalef_ps(bits_as<__m512>(values), bits_as<__m512>(powers)));
#else
  // In two steps, as the ends of the range are no exponents that a number can have.
  const i32x16 whole = convert<i32x16>(powers);
  const i32x16 half = whole >> 1;
  return values * bits_as<f32x16>((half + 127) << 23) * bits_as<f32x16>((whole - half + 127) << 23);
#endif
}

// Numbers of a magnitude below 2^22, rounded; ties to even.
QUIRE_INLINE f32x16 nearest_whole(f32x16 x) {
#if defined(__AVX512F__)
  return bits_as<f32x16>(_mm512_roundscale_ps(bits_as<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  constexpr float kRound = 12582912.0f;  // as in `exp`
  return (x + kRound) - kRound;
#endif
}

// Within 1.2 ulp. exp(-inf) is 0, exp(0) is exactly 1, exp of a NaN is NaN, and exp of more than 88.73 infinity.
QUIRE_INLINE f32x16 exp(f32x16 x) {
  x = minimum(splat(90.0f), maximum(splat(-110.0f), x));  // in this order, a NaN stays
  constexpr float kRound = 12582912.0f;                   // 1.5 * 2^23: adding and taking it away rounds to a whole number
  const f32x16 shifted = x * 1.44269504f + kRound;
  f32x16 power = shifted - kRound;
  // ln 2 in two parts, of which the first has few bits: its product with `power` is exact.
  f32x16 rest = x - power * 0.693359375f;
  rest = rest - power * -2.12194440e-4f;
#if !defined(__AVX512F__)
  power = select(power == power, power, f32x16{});  // a NaN is no whole number; `rest` keeps it
#endif
  f32x16 sum = splat(1.3814596e-3f);
  sum = sum * rest + 8.3687175e-3f;
  sum = sum * rest + 4.166839e-2f;
  sum = sum * rest + 1.6666521e-1f;
  sum = sum * rest + 4.9999994e-1f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  return times_power_of_two(sum, power);
}

// 2 to the power of numbers that are at most 0, within 3 parts in a million. It is 0 for -inf, exactly 1 for 0, and NaN for NaN.
QUIRE_INLINE f32x16 rough_exp2(f32x16 x) {
  x = maximum(splat(-160.0f), x);
  f32x16 power = nearest_whole(x);
  const f32x16 rest = x - power;
#if !defined(__AVX512F__)
  power = select(power == power, power, f32x16{});  // as in `exp`
#endif
  f32x16 sum = splat(9.58284363e-3f);
  sum = sum * rest + 5.59064262e-2f;
  sum = sum * rest + 2.40240991e-1f;
  sum = sum * rest + 6.93124175e-1f;
  sum = sum * rest + 1.0f;
  return times_power_of_two(sum, power);
}

// log(1 + exp(x)).
QUIRE_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 small = exp(select(x < 0.0f, x, -x));
  // log(1 + y) is 2 atanh(y / (2 + y)), whose series ends early up to 1 / 3.
  const f32x16 ratio = small / (small + 2.0f);
  const f32x16 square = ratio * ratio;
  f32x16 sum = splat(1.0f / 15);
  sum = sum * square + 1.0f / 13;
  sum = sum * square + 1.0f / 11;
  sum = sum * square + 1.0f / 9;
  sum = sum * square + 1.0f / 7;
  sum = sum * square + 1.0f / 5;
  sum = sum * square + 1.0f / 3;
  sum = sum * square + 1.0f;
  return select(x > 0.0f, x, f32x16{}) + 2.0f * ratio * sum;
}

// Within 1.4 ulp.
QUIRE_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 magnitude = select(x < 0.0f, -x, x);
  const f32x16 square = x * x;
  f32x16 sum = splat(-5.717037e-3f);
  sum = sum * square + 2.0650579e-2f;
  sum = sum * square - 5.3743497e-2f;
  sum = sum * square + 1.3331491e-1f;
  sum = sum * square - 3.3333284e-1f;
  const f32x16 near = sum * square * x + x;
  const f32x16 far = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  const f32x16 signed_far = select(x < 0.0f, -far, far);
  return select(magnitude < 0.625f, near, signed_far);
}

// The probability that a normal number is more than |x| from the mean on one side, (1 - erf(|x| / sqrt(2))) / 2: within 6e-8,
// and 0 from 6 on.
QUIRE_INLINE f32x16 normal_tail(f32x16 x) {
  const f32x16 magnitude = select(x < 0.0f, -x, x);
  const f32x16 limited = select(magnitude > 6.0f, splat(6.0f), magnitude);
  // Its logarithm to base 2.
  f32x16 log = splat(-2.77200094e-6f);
  log = log * limited + 3.86202667e-5f;
  log = log * limited - 1.82545734e-4f;
  log = log * limited - 1.45873741e-4f;
  log = log * limited + 7.07547541e-3f;
  log = log * limited - 5.25050305e-2f;
  log = log * limited - 4.59204907e-1f;
  log = log * limited - 1.15110572f;
  log = log * limited - 1.0f;
  f32x16 power = nearest_whole(log);
  const f32x16 rest = log - power;
#if !defined(__AVX512F__)
  power = select(power == power, power, f32x16{});
#endif
  f32x16 sum = splat(1.53458122e-4f);
  sum = sum * rest + 1.33999315e-3f;
  sum = sum * rest + 9.61848896e-3f;
  sum = sum * rest + 5.55032878e-2f;
  sum = sum * rest + 2.40226469e-1f;
  sum = sum * rest + 6.93147206e-1f;
  sum = sum * rest + 1.0f;
  return select(magnitude > 6.0f, f32x16{}, times_power_of_two(sum, power));
}

}  // namespace quire::QUIRE_ISA
