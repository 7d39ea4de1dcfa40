// The memory that a call of attention works in. Compiled once for each instruction set.
#pragma once

#include "attention.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kTasksPerThread = 4;  // below that, the spans of a row block become tasks of their own

// What a thread works in: the places of its parts from the start of the thread's memory, in bytes.
struct ThreadScratch {
  int64_t num_rows;
  int64_t query;
  int64_t query_rows;  // [num_rows] QueryRow
  int64_t keys;
  int64_t values;
  int64_t scores;
  int64_t weights;
  int64_t tiles;  // [2] Tile
  int64_t states[2];
  int64_t total = 0;

  explicit ThreadScratch(const AttentionCall& call) : num_rows(call.plan->max_rows()) {
    const int64_t head_dim = call.kv->head_dim, value_dim = call.kv->value_dim;
    query = take(num_rows * head_dim * 4);
    query_rows = take(num_rows * sizeof(QueryRow));
    keys = take(kTileTokens * head_dim * 4);
    values = take(kTileTokens * value_dim * 4);
    scores = take(kMaxPackedRows * kTileTokens * 4);
    weights = take(kMaxPackedRows * kTileTokens * 4);
    tiles = take(2 * sizeof(Tile));
    for (int64_t& state : states) state = take(State::bytes(num_rows, value_dim));
  }

 private:
  int64_t take(int64_t bytes) {
    const int64_t start = total;
    total += round_up(bytes, kLine);
    return start;
  }
};

// Where the parts of a call's memory begin, in bytes.
struct Layout {
  ThreadScratch thread;
  int64_t normalizers;   // [T, heads, 2] maximum and reciprocal sum of each row, if key scores are summed
  int64_t kept_weights;  // see KeptWeights
  int64_t kept_best;
  int64_t partials;  // states of the spans, if those are tasks of their own
  int64_t partial_bytes;
  int64_t threads;
  int64_t total;
  bool is_split;

  Layout(const AttentionCall& call, int num_threads) : thread(call) {
    const AttentionPlan& plan = *call.plan;
    const int64_t num_heads = call.kv->num_kv_heads * plan.group;
    const int64_t num_kept = call.key_scores != nullptr ? num_heads * call.key_scores->num_row_numbers : 0;
    const bool has_sums = call.key_scores != nullptr && call.key_scores->num_sums > 0;
    normalizers = 0;
    kept_weights = normalizers + (has_sums ? round_up(2 * plan.num_tokens * num_heads * 4, kLine) : 0);
    kept_best = kept_weights + num_kept * 4;
    partials = kept_best + round_up(num_kept / kTileTokens * 4, kLine);
    partial_bytes = round_up(State::bytes(plan.max_rows(), call.kv->value_dim), kLine);
    const int64_t all_partials = plan.num_spans * call.kv->num_kv_heads * partial_bytes;
    is_split = num_threads > 1 && plan.num_head_blocks == 0 && plan.num_spans > plan.num_blocks &&
               all_partials <= kMaxPartialBytes && plan.num_blocks * call.kv->num_kv_heads < kTasksPerThread * num_threads;
    threads = partials + (is_split ? all_partials : 0);
    total = threads + num_threads * thread.total;
  }
};

}  // namespace quire::QUIRE_ISA
