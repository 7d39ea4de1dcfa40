// The running softmax of attention: from the scores of a tile to weights, and from spans to the whole. Compiled once for each
// instruction set.
#pragma once

#include <memory>
#include <type_traits>

#include "attention.h"
#include "attention_tiles.h"
#include "simd.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {

constexpr float kNothing = -__builtin_inff();

// Running maximum, sum (in sixteen lanes) and total of each row.
struct State {
  float* best;
  float* sums;
  float* totals;

  static int64_t bytes(int64_t num_rows, int64_t value_dim) {
    return round_up(num_rows * 4, kLine) + num_rows * (kLanes + value_dim) * 4;
  }
  static State at(char* memory, int64_t num_rows) {
    float* sums = reinterpret_cast<float*>(memory + round_up(num_rows * 4, kLine));
    return {reinterpret_cast<float*>(memory), sums, sums + num_rows * kLanes};
  }
};

QUIRE_INLINE float largest(f32x16 values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bits_as<__m512>(values));
#else
  return max_of_lanes(values);
#endif
}

// Makes the products of one row in a tile ready for the softmax. The row sees the keys from `first` to `last`.
QUIRE_INLINE void finish_scores(const AttentionCall& call, const float* key_scales, int first, int last,
                                f32x16 (&scores)[kTileVectors]) {
  if (key_scales != nullptr) {
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) scores[i] = scores[i] * load(key_scales + i * kLanes);
  }
  if (call.softcap != 0.0f) {
    const float inverse = 1.0f / call.softcap;
    for (int i = 0; i < kTileVectors; ++i) scores[i] = tanh(scores[i] * inverse) * call.softcap;
  }
  if (first > 0 || last < kTileTokens - 1) {
    const i32x16 lanes = load_bits<i32x16>(kLaneNumbers);
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) {
      const i32x16 is_seen = (lanes >= first - i * kLanes) & (lanes <= last - i * kLanes);
      scores[i] = select(is_seen, scores[i], splat(kNothing));
    }
  }
}

// What scores get by distance, with the numbers at both ends repeated, so that those of any tile's keys are adjacent.
class TileBias {
 public:
  TileBias(const DistanceBias& bias, int64_t num_heads) : max_distance_(bias.max_distance) {
    if (bias.numbers == nullptr) return;
    numbers_.reset(new float[num_heads * stride()]);
    const float* from = bias.numbers;
    float* to = numbers_.get();
    for (int64_t head = 0; head < num_heads; ++head, from += 2 * max_distance_ + 1) {
      for (int64_t i = 0; i < stride(); ++i) *to++ = from[max(0, min(i - kRepeated, 2 * max_distance_))];
    }
  }

  explicit operator bool() const { return numbers_ != nullptr; }

  // Adds to the scores of a head's row in a tile, whose first key is `distance` places behind the row's token. It is never a part
  // of its callers: a sum that one of them rounds together with the product before it would have other bits.
  __attribute__((noinline)) void add_to(f32x16 (&scores)[kTileVectors], int64_t head, int64_t distance) const {
    const int64_t place = max(0, min(distance + max_distance_ + kRepeated, 2 * max_distance_ + kRepeated));
    const float* from = numbers_.get() + head * stride() + place;
    for (int i = 0; i < kTileVectors; ++i) scores[i] = scores[i] + load(from + i * kLanes);
  }

 private:
  static constexpr int64_t kRepeated = kTileTokens - 1;

  int64_t stride() const { return 2 * (max_distance_ + kRepeated) + 1; }

  int64_t max_distance_;
  std::unique_ptr<float[]> numbers_;  // [heads, stride]; null: nothing is added
};

// exp(scores - best), as exact as weights need it that are rounded to Number.
template <class Number>
QUIRE_INLINE f32x16 share(f32x16 scores, float best) {
  if constexpr (std::is_same_v<Number, float>) {
    return exp(scores - best);
  } else {
    constexpr float kLog2OfE = 1.44269504f;
    return rough_exp2(scores * kLog2OfE - splat(best * kLog2OfE));
  }
}

// Stores the weights of a row in a tile. Returns what they are to be multiplied by.
template <class Number>
QUIRE_INLINE float store_weights(const f32x16 (&weights)[kTileVectors], Number* to) {
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) store(to + i * kLanes, weights[i]);
  return 1.0f;
}

struct Weighed {
  float factor;  // by which what was summed before counts from now on
  float unit;    // that the weights are to be multiplied by
};

// Turns the scores of a row into weights, and takes them into the row's maximum and sum. `kept`: where the weights go as they are;
// or null.
template <class Number>
QUIRE_INLINE Weighed weigh(const f32x16 (&scores)[kTileVectors], const float* value_scales, float* best, float* sums,
                           Number* weights, float* kept) {
  const float found = largest(maximum(maximum(scores[0], scores[1]), maximum(scores[2], scores[3])));
  const float before = *best;
  float factor = 1.0f;
  f32x16 sum = load(sums);
  if (found > before) {
    *best = found;
    factor = exp(splat(before - found))[0];
    sum = sum * factor;
  }
  f32x16 shares[kTileVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) shares[i] = share<Number>(scores[i], *best);
  store(sums, sum + ((shares[0] + shares[1]) + (shares[2] + shares[3])));
  if (kept != nullptr) {
    for (int i = 0; i < kTileVectors; ++i) store(kept + i * kLanes, shares[i]);
  }
  if (value_scales != nullptr) {
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) shares[i] = shares[i] * load(value_scales + i * kLanes);
  }
  return {factor, store_weights(shares, weights)};
}

inline void clear(const State& state, int64_t num_rows, int64_t value_dim) {
  for (int64_t row = 0; row < num_rows; ++row) state.best[row] = kNothing;
  std::memset(state.sums, 0, num_rows * kLanes * sizeof(float));
  std::memset(state.totals, 0, num_rows * value_dim * sizeof(float));
}

// Adds a later span. Rows that saw nothing of it keep their bits.
inline __attribute__((noinline)) void merge(const State& into, const State& later, int64_t num_rows, int64_t value_dim) {
  for (int64_t row = 0; row < num_rows; ++row) {
    if (sum_of_lanes(load(later.sums + row * kLanes)) == 0.0f) continue;  // of what was seen, the sum is at least 1, or NaN
    const float best = later.best[row] > into.best[row] ? later.best[row] : into.best[row];
    const f32x16 old_factor = exp(splat(into.best[row] - best));
    const f32x16 new_factor = exp(splat(later.best[row] - best));
    into.best[row] = best;
    float* sums = into.sums + row * kLanes;
    store(sums, load(sums) * old_factor + load(later.sums + row * kLanes) * new_factor);
    for (int64_t i = row * value_dim; i < (row + 1) * value_dim; i += kLanes) {
      store(into.totals + i, load(into.totals + i) * old_factor + load(later.totals + i) * new_factor);
    }
  }
}

}  // namespace quire::QUIRE_ISA
