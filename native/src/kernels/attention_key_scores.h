// What the keys get of the attention of tokens whose key scores are wanted: see KeyScores. Compiled once for each instruction set.
//
// The weights of a row are final only when its last tile has been seen. Tokens that want rows keep their weights as they are, and
// of each tile the row's maximum at that time, by which they are corrected in the end. Tokens that want sums may be too many for
// that: their weights are computed a second time.
#pragma once

#include "attention.h"
#include "attention_scratch.h"
#include "attention_softmax.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

using i64x16 = Vector<int64_t, kLanes>;

// The kept weights of all rows, head after head, each as `rows` of KeyScores.
class KeptWeights {
 public:
  KeptWeights(const AttentionCall& call, const Layout& layout)
      : scores_(call.key_scores),
        weights_(reinterpret_cast<float*>(call.scratch + layout.kept_weights)),
        best_(reinterpret_cast<float*>(call.scratch + layout.kept_best)) {}

  // No tile has been seen.
  void clear(int64_t num_heads) const {
    const int64_t count = num_heads * num_tiles();
    for (int64_t i = 0; i < count; ++i) best_[i] = kNothing;
  }

  // Where a token's weights of a tile go; null if they are not wanted.
  QUIRE_INLINE float* weights(const AttentionToken& token, int64_t head, int64_t tile) const {
    const int64_t start = scores_->row_starts[token.row];
    return start < 0 ? nullptr : weights_ + head * scores_->num_row_numbers + start + tile * kTileTokens;
  }

  QUIRE_INLINE void note_best(const float* weights, float best) const { best_[(weights - weights_) / kTileTokens] = best; }

  // Makes the weights of a row final. `scale`: what a weight is multiplied by that was computed with the maximum `best`.
  void finish_row(const AttentionToken& token, int64_t head, float best, float scale) const {
    if (scores_->row_starts[token.row] < 0) return;
    for (int64_t tile = 0; tile <= token.position / kTileTokens; ++tile) {
      float* at = weights(token, head, tile);
      const float best_then = best_[(at - weights_) / kTileTokens];
      if (best_then == kNothing) continue;
      // What is not finite counts nothing.
      const float factor = scale > 0.0f ? exp(splat(best_then - best))[0] * scale : 0.0f;
      for (int i = 0; i < kTileTokens; i += kLanes) store(at + i, factor > 0.0f ? load(at + i) * factor : f32x16{});
    }
  }

  // Writes some tiles of `rows`, as the sum over all heads.
  void write_tiles(int64_t tile_group, int64_t num_heads) const {
    const int64_t end = min(num_tiles(), (tile_group + 1) * kTilesPerGroup);
    for (int64_t tile = tile_group * kTilesPerGroup; tile < end; ++tile) write_tile(tile, num_heads);
  }

  int64_t num_tile_groups() const { return ceil_div(num_tiles(), kTilesPerGroup); }

 private:
  static constexpr int64_t kTilesPerGroup = 16;

  int64_t num_tiles() const { return scores_->num_row_numbers / kTileTokens; }

  void write_tile(int64_t tile, int64_t num_heads) const {
    f32x16 sums[kTileVectors] = {};
    for (int64_t head = 0; head < num_heads; ++head) {
      if (best_[head * num_tiles() + tile] == kNothing) continue;
      const float* from = weights_ + head * scores_->num_row_numbers + tile * kTileTokens;
      for (int i = 0; i < kTileVectors; ++i) sums[i] = sums[i] + load(from + i * kLanes);
    }
    for (int i = 0; i < kTileVectors; ++i) store(scores_->rows + tile * kTileTokens + i * kLanes, sums[i]);
  }

  const KeyScores* scores_;
  float* weights_;
  float* best_;
};

// The sums of the keys of one tile, until they are added to those of a sequence.
class TileSums {
 public:
  // Adds what a row gives to each key, rounded down to a multiple of kScoreUnit.
  QUIRE_INLINE void add(const f32x16 (&weights)[kTileVectors]) {
    for (int i = 0; i < kTileVectors; ++i) sums_[i] += convert<i64x16>(weights[i] * (1.0f / kScoreUnit));
  }

  // Other threads may do so, too; integers give the same in any order.
  void move_to(int64_t* sums) {
    for (int key = 0; key < kTileTokens; ++key) {
      const int64_t sum = sums_[key / kLanes][key % kLanes];
      if (sum != 0) __atomic_fetch_add(sums + key, sum, __ATOMIC_RELAXED);
    }
    for (i64x16& sums : sums_) sums = i64x16{};
  }

 private:
  i64x16 sums_[kTileVectors] = {};
};

}  // namespace quire::QUIRE_ISA
