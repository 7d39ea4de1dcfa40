// exp, tanh, erf and softplus of sixteen numbers. The coefficients are least-maximum fits made for these ranges.
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

// Within 1.2 ulp. exp(-inf) is 0, exp(0) is exactly 1, exp of a NaN is NaN, and exp of more than 88.73 infinity.
QUIRE_INLINE f32x16 exp(f32x16 x) {
  // The comparisons are so that a NaN stays.
  x = select(x < -110.0f, splat(-110.0f), x);
  x = select(x > 90.0f, splat(90.0f), x);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to a whole number
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

// Within 3 ulp.
QUIRE_INLINE f32x16 erf(f32x16 x) {
  const f32x16 magnitude = select(x < 0.0f, -x, x);
  const f32x16 square = x * x;
  f32x16 sum = splat(7.8824974e-5f);
  sum = sum * square - 8.018855e-4f;
  sum = sum * square + 5.1893123e-3f;
  sum = sum * square - 2.6854329e-2f;
  sum = sum * square + 1.1283597e-1f;
  sum = sum * square - 3.7612626e-1f;
  const f32x16 near = sum * x * square + x * 1.1283791f;
  // The logarithm of 1 - erf; from 4 on erf rounds to 1.
  const f32x16 limited = select(magnitude > 4.0f, splat(4.0f), magnitude);
  f32x16 log = splat(1.6140616e-6f);
  log = log * limited - 4.5590623e-5f;
  log = log * limited + 5.9276953e-4f;
  log = log * limited - 4.7402224e-3f;
  log = log * limited + 2.6364718e-2f;
  log = log * limited - 1.0997824e-1f;
  log = log * limited - 6.319371e-1f;
  log = log * limited - 1.1301666f;
  log = log * limited + 3.0321296e-4f;
  const f32x16 far = 1.0f - exp(log);
  const f32x16 signed_far = select(x < 0.0f, -far, far);
  return select(magnitude < 1.0f, near, signed_far);
}

}  // namespace quire::QUIRE_ISA
