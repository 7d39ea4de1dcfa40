// Norms and activations: see elementwise.h. Compiled once for each instruction set.
#include "elementwise.h"

#include "rows.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
void add_row(T* row, const T* delta, float scale, int64_t count) {
  for (int64_t column = 0; column < count; column += kLanes) {
    const int64_t left = count - column;
    store_left(row + column, load_left(row + column, left) + load_left(delta + column, left) * scale, left);
  }
}

template <class T>
void norm_rows(const NormCall& call, ThreadPool& pool) {
  for_each_row(pool, call.num_rows, call.num_features, [&](int64_t index) {
    T* row = static_cast<T*>(call.rows) + index * call.row_stride;
    if (call.delta != nullptr) {
      add_row(row, static_cast<const T*>(call.delta) + index * call.delta_stride, call.scale, call.num_features);
    }
    if (call.weight != nullptr) {
      normalize(row, call.weight, call.num_features, call.eps, static_cast<T*>(call.out) + index * call.out_stride);
    }
  });
}

template <Activation kActivation>
QUIRE_INLINE f32x16 activate(f32x16 x) {
  if constexpr (kActivation == Activation::kSilu) return x / (exp(-x) + 1.0f);
  if constexpr (kActivation == Activation::kGelu) return (erf(x * 0.70710678f) + 1.0f) * x * 0.5f;
  const f32x16 inner = (x * x * x * 0.044715f + x) * 0.79788456f;  // sqrt(2 / pi)
  return (tanh(inner) + 1.0f) * x * 0.5f;
}

template <class T, Activation kActivation>
void activate_rows(const GatedActivationCall& call, ThreadPool& pool) {
  for_each_row(pool, call.num_rows, call.num_features, [&](int64_t index) {
    const T* gate = static_cast<const T*>(call.gate_up) + index * call.row_stride;
    const T* up = gate + call.num_features;
    T* out = static_cast<T*>(call.out) + index * call.out_stride;
    for (int64_t column = 0; column < call.num_features; column += kLanes) {
      const int64_t left = call.num_features - column;
      store_left(out + column, activate<kActivation>(load_left(gate + column, left)) * load_left(up + column, left), left);
    }
  });
}

template <class T>
void activate_as(const GatedActivationCall& call, ThreadPool& pool) {
  switch (call.activation) {
    case Activation::kSilu: return activate_rows<T, Activation::kSilu>(call, pool);
    case Activation::kGeluTanh: return activate_rows<T, Activation::kGeluTanh>(call, pool);
    case Activation::kGelu: return activate_rows<T, Activation::kGelu>(call, pool);
  }
}

}  // namespace

void norm(const NormCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return norm_rows<bf16>(call, pool);
    case DType::kFloat16: return norm_rows<fp16>(call, pool);
    default: return norm_rows<float>(call, pool);
  }
}

void gated_activation(const GatedActivationCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return activate_as<bf16>(call, pool);
    case DType::kFloat16: return activate_as<fp16>(call, pool);
    default: return activate_as<float>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
