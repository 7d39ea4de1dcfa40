// Attention of a ragged batch over a paged KV cache.
//
// Keys are cut into tiles at fixed places of a sequence's cache; positions are these places. A row (one head of one token) takes up the tiles it sees in rising order,
// with a running maximum, sum and total (FlashAttention-2, Dao 2023). Tiles are gathered in spans, also at absolute
// positions: each span starts anew, and the spans of a row are merged in rising order. So a row's bits depend neither on the
// other rows, nor on the block size, nor on which thread computes what.
#pragma once

#include <cstdint>

#include "elementwise.h"
#include "thread_pool.h"
#include "types.h"

namespace quire {

constexpr int kTileTokens = 64;
constexpr int kSpanTokens = 1024;
constexpr int kHeadDimMultiple = 16;
constexpr int kMaxHeadDim = 576;
constexpr int64_t kMaxPartialBytes = int64_t{64} << 20;  // spans whose states would take more are no tasks of their own
constexpr int kMaxStride = 64;                           // of KeySelection
constexpr int kBlockRows = 128;  // rows that are taken through the tiles together, unless one token alone has more

// A token of a row block: its row in the batch, the last place of its sequence that it sees, which may be beyond the end, and its
// own place.
struct AttentionToken {
  int32_t row;
  int32_t position;
  int32_t place;
};

// Consecutive tokens of a row block that see something of a tile and find it in the same blocks. Of the tile they read the
// keys from `first_key` to `end_key` and no others.
struct AttentionVisit {
  int32_t first_token;
  int32_t num_tokens;
  int32_t tile;
  int32_t sequence;  // whose block table leads to the keys
  int32_t first_key;
  int32_t end_key;
};

struct AttentionSpan {
  int32_t first_visit;
  int32_t num_visits;
};

constexpr int32_t kAllHeads = -1;

struct RowBlock {
  int32_t first_token;
  int32_t num_tokens;
  int32_t first_span;
  int32_t num_spans;
  int32_t query_head;  // whose rows these are; or kAllHeads
};

// The work of a step for layers of one window and group; see AttentionPlanner.
struct AttentionPlan {
  const AttentionToken* tokens;
  const RowBlock* blocks;
  const AttentionSpan* spans;
  const AttentionVisit* visits;
  int64_t num_tokens;
  int64_t num_blocks;       // first those of all heads
  int64_t num_head_blocks;  // then these, each of one query head
  int64_t num_spans;
  int64_t num_visits;
  const int32_t* block_tables;
  int64_t table_stride;
  int32_t block_size;
  int32_t window;  // places up to a token's last one that it sees; 0: all
  int32_t group;   // query heads of a KV head

  int64_t num_shared_blocks() const { return num_blocks - num_head_blocks; }
  // Rows that a task may have.
  int64_t max_rows() const { return group > kBlockRows ? group : kBlockRows; }
};

constexpr float kScoreUnit = 1.0f / (int64_t{1} << 32);

// What the keys get of the attention of the step's tokens, over all heads. Rows and sums are of kTileTokens numbers for each tile
// of their sequence and are zero where a key is not seen. All of both is overwritten. The sums are in kScoreUnit.
struct KeyScores {
  const int64_t* row_starts;  // [T] where a token's row begins in `rows`; negative: it has none
  const int64_t* sum_starts;  // [T] where the sums of a token's sequence begin in `sums`; negative: it has none
  float* rows;
  int64_t* sums;
  int64_t num_row_numbers;
  int64_t num_sums;
};

// Tokens of one sequence that select the key blocks that they see. Blocks of queries and of keys begin at multiples of one size.
struct QueryBlock {
  int32_t sequence;
  int32_t first_row;  // in the batch
  int32_t num_tokens;
  int32_t first_position;
  int32_t first_token;     // in the plan
  int32_t num_keys;        // in the cache, to the end of the block's own key block at most
  int32_t num_key_blocks;  // the last one is the block's own
  int64_t first_mass;      // where its masses begin, [heads, num_key_blocks]

  bool has_choice() const { return num_key_blocks > 2; }
};

// What is added to scores by the place of the key less that of the token. Beyond `max_distance` it is what it is there.
struct DistanceBias {
  const float* numbers = nullptr;  // [heads, 2 * max_distance + 1], first those of keys before the token; null: nothing is added
  int64_t max_distance = 0;
};

// How tokens select key blocks: see KeySelection in quire/kernels/attention/sparse_prefill.py, which says how masses are estimated.
struct KeySelection {
  const QueryBlock* blocks;
  int64_t num_blocks;
  int64_t num_masses;
  int64_t max_keys;    // of a block
  int32_t block_size;  // tokens, a multiple of kTileTokens
  int32_t stride;      // divides block_size
  float threshold;
};

// One layer's part of the cache. The keys may be the values, too.
struct KVLayer {
  DType type;
  int64_t num_kv_heads;
  int64_t head_dim;   // of keys
  int64_t value_dim;  // of values
  CachePart keys;
  CachePart values;

  // Whether keys and values are held as `rotate` makes them.
  bool is_rotated() const { return type == DType::kInt4; }
};

// out [T, heads, value_dim] = attention of query [T, heads, head_dim] over the cache. Both sizes are multiples of
// kHeadDimMultiple, at most kMaxHeadDim.
struct AttentionCall {
  const AttentionPlan* plan;
  const KVLayer* kv;
  const void* query;
  DType query_type;
  int64_t query_stride;  // between tokens; a token's numbers are adjacent
  void* out;             // as the query; tokens are adjacent
  float scale;
  float softcap;                // 0: none
  const float* sinks;           // [heads] or null
  const KeyScores* key_scores;  // or null
  DistanceBias distance_bias;
  char* scratch;  // attention_scratch() bytes, aligned to 64
};

}  // namespace quire
