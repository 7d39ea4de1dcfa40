// The products of attention in the tile registers of AMX: scores of some rows in a packed tile, and weighted sums.
#pragma once

#include "amx_rows.h"
#include "attention_tiles.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kKeyStepBytes = kTileTokens * 4;
constexpr int kFetchesOfTile = 8;  // rows of the next tile that are fetched for each product

// As score_rows.
template <bool kIsTall>
void score_amx_rows(const bf16* rows, int64_t head_dim, Seen seen, const char* keys, float* scores, Ahead& ahead) {
  for (int key = seen.first / kAmxRows * kAmxRows; key < seen.end; key += kAmxRows) {
    clear_sums<kIsTall>();
    for (int64_t feature = 0; feature < head_dim; feature += AmxPath::kGroupFeatures) {
      for (int i = 0; i < kFetchesOfTile; ++i) ahead.fetch();
      const char* columns = keys + feature / AmxPath::kInputs * kKeyStepBytes + key * 4;
      add_steps_of_tile<BFloat16Product, kIsTall>(rows + feature, head_dim * 2, columns, kKeyStepBytes);
    }
    store_sums<kIsTall>(scores + key, kTileTokens * 4);
  }
}

template <bool kIsTall>
void add_amx_values(const WeightedSum<bf16>& sum, const char* values) {
  const int64_t first = sum.seen.first / AmxPath::kGroupFeatures * AmxPath::kGroupFeatures;
  for (int64_t feature = 0; feature < sum.value_dim; feature += kAmxRows) {
    load_sums<kIsTall>(sum.totals + feature, sum.value_dim * 4);
    for (int64_t token = first; token < sum.seen.end; token += AmxPath::kGroupFeatures) {
      const char* columns = values + (token / AmxPath::kInputs * sum.value_dim + feature) * 4;
      add_steps_of_tile<BFloat16Product, kIsTall>(sum.weights + token, kTileTokens * 2, columns, sum.value_dim * 4);
    }
    store_sums<kIsTall>(sum.totals + feature, sum.value_dim * 4);
  }
}

template <>
inline void score<AmxPath>(AmxPath::Registers& registers, int num_rows, const bf16* rows, int64_t head_dim, Seen seen,
                           const char* keys, float* scores, Ahead& ahead) {
  registers.shape(num_rows);
  if (num_rows > kTileLines) return score_amx_rows<true>(rows, head_dim, seen, keys, scores, ahead);
  score_amx_rows<false>(rows, head_dim, seen, keys, scores, ahead);
}

template <>
inline void add_values<AmxPath, PackedValues<AmxPath>>(AmxPath::Registers& registers, int num_rows, const WeightedSum<bf16>& sum,
                                                       const PackedValues<AmxPath>& values, Ahead&) {
  for (int row = 0; row < num_rows; ++row) {
    if (sum.factors[row] == 1.0f) continue;
    float* totals = sum.totals + row * sum.value_dim;
    for (int64_t i = 0; i < sum.value_dim; i += kLanes) store(totals + i, load(totals + i) * sum.factors[row]);
  }
  registers.shape(num_rows);
  if (num_rows > kTileLines) return add_amx_values<true>(sum, values.values);
  add_amx_values<false>(sum, values.values);
}

}  // namespace quire::QUIRE_ISA
