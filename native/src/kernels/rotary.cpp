// From the fused projection to the queries and the cache: see RotaryCall in elementwise.h. Compiled once for each instruction
// set.
#include "elementwise.h"

#include "attention.h"
#include "int4_kv.h"
#include "rows.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
void normalize_heads(T* heads, int64_t count, const float* weight, int64_t size, float eps) {
  for (T* part = heads; part < heads + count; part += size) normalize(part, weight, size, eps, part);
}

template <class T>
void rotate_head(T* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t column = 0; column < half; column += kLanes) {
    const int64_t left = half - column;
    const f32x16 first = load_left(head + column, left);
    const f32x16 second = load_left(head + half + column, left);
    const f32x16 c = load_left(cos + column, left);
    const f32x16 s = load_left(sin + column, left);
    store_left(head + column, first * c - second * s, left);
    store_left(head + half + column, second * c + first * s, left);
  }
}

// Calls store(column, numbers) with sixteen numbers of a head at a time, in the low bits of lanes: whole ones up to `most`. Returns
// their scale, which is NaN if the head holds a NaN or an infinity, which they cannot say.
template <class T, class Store>
float round_head(const T* head, int64_t count, float most, const Store& store) {
  f32x16 largest = {}, unsound = {};
  for (int64_t column = 0; column < count; column += kLanes) {
    const f32x16 values = load_left(head + column, count - column);
    largest = maximum(largest, maximum(values, -values));
    unsound += values * 0.0f;
  }
  const float limit = max_of_lanes(largest);
  const float inverse = limit > 0.0f ? 1.0f / limit * most : 0.0f;
  for (int64_t column = 0; column < count; column += kLanes) {
    // The limit changes nothing, but keeps the product and the sum after it from being rounded as one.
    const f32x16 scaled = minimum(load_left(head + column, count - column) * inverse, splat(most));
    // Adding 1.5 * 2^23 rounds to a whole number, ties to even, and leaves it in the low bits.
    store(column, bits_as<i32x16>(scaled + 12582912.0f));
  }
  return limit / most + sum_of_lanes(unsound);
}

template <class T>
void write_int8(const T* head, int64_t count, int8_t* to, float* scale) {
  *scale = round_head(head, count, 127.0f, [&](int64_t column, i32x16 numbers) {
    const auto bytes = low_bytes(numbers);
    const int64_t left = count - column;
    std::memcpy(to + column, &bytes, left >= kLanes ? kLanes : left);
  });
}

template <class T>
void write_int4(const T* head, int64_t count, Int4Pair* to, float* scale) {
  float rotated[kMaxHeadDim];
  rotate_into(head, count, rotated);
  *scale = round_head(rotated, count, kInt4Zero - 1, [&](int64_t column, i32x16 numbers) {
    store_int4(to + column / kFeatures<Int4Pair>, (numbers + kInt4Zero) & 15);
  });
}

template <class T, class C>
void write_floats(const T* head, int64_t count, C* to) {
  for (int64_t column = 0; column < count; column += kLanes) {
    store_left(to + column, load_left(head + column, count - column), count - column);
  }
}

template <class T>
void write_heads(const RotaryCall& call, const T* heads, int64_t size, const CachePart& part, int64_t row) {
  const int64_t block = call.blocks[row], offset = call.offsets[row];
  for (int64_t head = 0; head < call.num_kv_heads; ++head, heads += size) {
    const int64_t place = block * part.strides[0] + head * part.strides[1] + offset * part.strides[2];
    float* scale = part.scales + block * part.scale_strides[0] + head * part.scale_strides[1] + offset * part.scale_strides[2];
    switch (call.cache_type) {
      case DType::kFloat32: write_floats(heads, size, static_cast<float*>(part.numbers) + place); break;
      case DType::kBFloat16: write_floats(heads, size, static_cast<bf16*>(part.numbers) + place); break;
      case DType::kFloat16: write_floats(heads, size, static_cast<fp16*>(part.numbers) + place); break;
      case DType::kInt4: write_int4(heads, size, static_cast<Int4Pair*>(part.numbers) + place, scale); break;
      default: write_int8(heads, size, static_cast<int8_t*>(part.numbers) + place, scale);
    }
  }
}

template <class T>
void rotate_and_write_rows(const RotaryCall& call, ThreadPool& pool) {
  const int64_t num_rotated = call.num_heads + call.num_kv_heads;
  const bool has_values = call.values.numbers != call.keys.numbers;
  for_each_row(pool, call.num_rows, num_rotated * call.head_dim + call.num_kv_heads * call.value_dim, [&](int64_t row) {
    T* queries = static_cast<T*>(call.qkv) + row * call.row_stride;
    T* keys = queries + call.num_heads * call.head_dim;
    T* values = keys + call.num_kv_heads * call.head_dim;
    if (call.q_norm != nullptr) normalize_heads(queries, keys - queries, call.q_norm, call.q_norm_size, call.eps);
    if (call.k_norm != nullptr) normalize_heads(keys, values - keys, call.k_norm, call.k_norm_size, call.eps);
    if (call.cos != nullptr) {
      for (int64_t head = 0; head < num_rotated; ++head) {
        rotate_head(queries + head * call.head_dim, call.cos + row * call.half, call.sin + row * call.half, call.half);
      }
    }
    if (call.num_kv_heads == 0) return;
    write_heads(call, keys, call.head_dim, call.keys, row);
    if (has_values) write_heads(call, values, call.value_dim, call.values, row);
  });
}

}  // namespace

void rotary_and_write_kv(const RotaryCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return rotate_and_write_rows<bf16>(call, pool);
    case DType::kFloat16: return rotate_and_write_rows<fp16>(call, pool);
    default: return rotate_and_write_rows<float>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
