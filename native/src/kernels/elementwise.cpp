// Norms, activations and sums: see elementwise.h. Compiled once for each instruction set.
#include "elementwise.h"

#include "activations.h"
#include "rows.h"

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
    T* out = static_cast<T*>(call.out) + index * call.out_stride;
    if (call.bias != nullptr) {
      normalize_layer(row, call.weight, call.bias, call.num_features, call.eps, out);
    } else if (call.weight != nullptr) {
      normalize(row, call.weight, call.num_features, call.eps, out);
    }
  });
}

template <class T, Activation kActivation, bool kHasUp>
void activate_rows(const GatedActivationCall& call, ThreadPool& pool) {
  for_each_row(pool, call.num_rows, call.num_features, [&](int64_t index) {
    const T* gate = static_cast<const T*>(call.gate_up) + index * call.row_stride;
    const T* up = gate + call.num_features;
    T* out = static_cast<T*>(call.out) + index * call.out_stride;
    for (int64_t column = 0; column < call.num_features; column += kLanes) {
      const int64_t left = call.num_features - column;
      f32x16 values = load_left(gate + column, left);
      if constexpr (kHasUp) {
        values = gated<kActivation>(values, load_left(up + column, left));
      } else {
        values = activate<kActivation>(values);
      }
      store_left(out + column, values, left);
    }
  });
}

template <class T, bool kHasUp>
void activate_as(const GatedActivationCall& call, ThreadPool& pool) {
  switch (call.activation) {
    case Activation::kSilu: return activate_rows<T, Activation::kSilu, kHasUp>(call, pool);
    case Activation::kGeluTanh: return activate_rows<T, Activation::kGeluTanh, kHasUp>(call, pool);
    case Activation::kGelu: return activate_rows<T, Activation::kGelu, kHasUp>(call, pool);
    case Activation::kRelu2: return activate_rows<T, Activation::kRelu2, kHasUp>(call, pool);
    case Activation::kClampedSwiglu: return activate_rows<T, Activation::kClampedSwiglu, kHasUp>(call, pool);
  }
}

template <class T>
void activate_all(const GatedActivationCall& call, ThreadPool& pool) {
  return call.has_up ? activate_as<T, true>(call, pool) : activate_as<T, false>(call, pool);
}

template <class T, bool kHasSilu>
void gate_rows(const GateCall& call, ThreadPool& pool) {
  for_each_row(pool, call.num_tokens * call.num_heads, call.num_features, [&](int64_t index) {
    T* row = static_cast<T*>(call.rows) + index * call.num_features;
    const T* gate = static_cast<const T*>(call.gate) + index / call.num_heads * call.gate_strides[0] +
                    index % call.num_heads * call.gate_strides[1];
    const float factor = call.norm_weight == nullptr ? 1.0f : norm_factor(row, call.num_features, call.eps);
    for (int64_t column = 0; column < call.num_features; column += kLanes) {
      const int64_t left = call.num_features - column;
      f32x16 values = load_left(row + column, left);
      if (call.norm_weight != nullptr) values = values * factor * load_left(call.norm_weight + column, left);
      const f32x16 gates = call.gate_strides[2] == 0 ? splat(to_float(*gate)) : load_left(gate + column, left);
      store_left(row + column, values * ((kHasSilu ? gates : splat(1.0f)) / (exp(-gates) + 1.0f)), left);
    }
  });
}

template <class T>
void gate_all(const GateCall& call, ThreadPool& pool) {
  return call.has_silu ? gate_rows<T, true>(call, pool) : gate_rows<T, false>(call, pool);
}

template <class T>
void combine_rows(const CombineCall& call, ThreadPool& pool) {
  for_each_row(pool, call.num_rows, call.num_parts * call.num_features, [&](int64_t row) {
    T* out = static_cast<T*>(call.out) + row * call.out_stride;
    const int64_t* places = call.places + row * call.num_parts;
    const float* weights = call.weights + row * call.num_parts;
    for (int64_t column = 0; column < call.num_features; column += kLanes) {
      const int64_t left = call.num_features - column;
      f32x16 sum = {};
      for (int64_t part = 0; part < call.num_parts; ++part) {
        sum += load_left(call.parts + places[part] * call.num_features + column, left) * weights[part];
      }
      store_left(out + column, sum, left);
    }
  });
}

// Adds one row's columns to sums, which the compiler does in vectors.
template <class T>
QUIRE_INLINE void add_rounded(const T* row, int64_t count, double factor, double unit, double* sums) {
  const double per_unit = 1 / unit;
  for (int64_t column = 0; column < count; column += kLanes) {
    float values[kLanes];
    store(values, load_left(row + column, count - column));
    for (int lane = 0; lane < kLanes; ++lane) sums[column + lane] += __builtin_rint(values[lane] * factor * per_unit) * unit;
  }
}

template <class T>
void sum_rows_of(const SumRowsCall& call, ThreadPool& pool) {
  constexpr int64_t kColumns = 8 * kLanes;
  const int64_t num_blocks = ceil_div(call.num_features, kColumns);
  int64_t num_rows = 0;
  for (int64_t piece = 0; piece < call.num_pieces; ++piece) num_rows += call.pieces[piece].num_rows;
  const int64_t numbers = num_rows * kColumns / max(call.num_pieces, int64_t{1}) + 1;
  for_each_row(pool, call.num_pieces * num_blocks, numbers, [&](int64_t index) {
    const SumRowsCall::Piece& piece = call.pieces[index / num_blocks];
    const int64_t first = index % num_blocks * kColumns;
    const int64_t count = min(kColumns, call.num_features - first);
    double* to = call.sums + piece.place * call.num_features + first;
    double sums[kColumns] = {};
    for (int64_t column = 0; column < count && !piece.begins; ++column) sums[column] = to[column];
    for (int64_t row = piece.first_row; row < piece.first_row + piece.num_rows; ++row) {
      const T* from = static_cast<const T*>(call.rows) + row * call.row_stride + first;
      add_rounded(from, count, call.shares == nullptr ? 1.0 : call.shares[row], call.unit, sums);
    }
    for (int64_t column = 0; column < count; ++column) to[column] = sums[column];
  });
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
    case DType::kBFloat16: return activate_all<bf16>(call, pool);
    case DType::kFloat16: return activate_all<fp16>(call, pool);
    default: return activate_all<float>(call, pool);
  }
}

void gate(const GateCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return gate_all<bf16>(call, pool);
    case DType::kFloat16: return gate_all<fp16>(call, pool);
    default: return gate_all<float>(call, pool);
  }
}

void soft_cap(const SoftCapCall& call, ThreadPool& pool) {
  parallel_for(pool, ceil_div(call.count, kNumbersPerTask), [&](int64_t task, int) {
    const int64_t end = min((task + 1) * kNumbersPerTask, call.count);
    for (int64_t i = task * kNumbersPerTask; i < end; i += kLanes) {
      store_left(call.numbers + i, tanh(load_left(call.numbers + i, end - i) / call.cap) * call.cap, end - i);
    }
  });
}

void sum_rows(const SumRowsCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return sum_rows_of<bf16>(call, pool);
    case DType::kFloat16: return sum_rows_of<fp16>(call, pool);
    default: return sum_rows_of<float>(call, pool);
  }
}

void combine(const CombineCall& call, ThreadPool& pool) {
  switch (call.out_type) {
    case DType::kBFloat16: return combine_rows<bf16>(call, pool);
    case DType::kFloat16: return combine_rows<fp16>(call, pool);
    default: return combine_rows<float>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
