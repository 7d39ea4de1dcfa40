// Activations of sixteen numbers. Compiled once for each instruction set.
#pragma once

#include "elementwise.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {

constexpr float kSwigluAlpha = 1.702f, kSwigluLimit = 7.0f;  // of gpt-oss

template <Activation kActivation>
QUIRE_INLINE f32x16 activate(f32x16 x) {
  if constexpr (kActivation == Activation::kSilu) return x / (exp(-x) + 1.0f);
  if constexpr (kActivation == Activation::kGelu) {
    const f32x16 outside = x * normal_tail(x);
    return select(x < 0.0f, outside, x - outside);
  }
  if constexpr (kActivation == Activation::kRelu2) {
    const f32x16 positive = select(x < 0.0f, splat(0.0f), x);  // so that a NaN stays
    return positive * positive;
  }
  if constexpr (kActivation == Activation::kClampedSwiglu) {
    const f32x16 gate = select(x > kSwigluLimit, splat(kSwigluLimit), x);
    return gate / (exp(gate * -kSwigluAlpha) + 1.0f);
  }
  const f32x16 inner = (x * x * x * 0.044715f + x) * 0.79788456f;  // sqrt(2 / pi)
  return (tanh(inner) + 1.0f) * x * 0.5f;
}

template <Activation kActivation>
QUIRE_INLINE f32x16 gated(f32x16 gate, f32x16 up) {
  if constexpr (kActivation == Activation::kClampedSwiglu) {
    up = select(up > kSwigluLimit, splat(kSwigluLimit), up);
    up = select(up < -kSwigluLimit, splat(-kSwigluLimit), up) + 1.0f;
  }
  return activate<kActivation>(gate) * up;
}

inline f32x16 gated(Activation activation, f32x16 gate, f32x16 up) {
  switch (activation) {
    case Activation::kSilu: return gated<Activation::kSilu>(gate, up);
    case Activation::kGeluTanh: return gated<Activation::kGeluTanh>(gate, up);
    case Activation::kGelu: return gated<Activation::kGelu>(gate, up);
    case Activation::kRelu2: return gated<Activation::kRelu2>(gate, up);
    case Activation::kClampedSwiglu: return gated<Activation::kClampedSwiglu>(gate, up);
  }
  return gate;
}

}  // namespace quire::QUIRE_ISA
