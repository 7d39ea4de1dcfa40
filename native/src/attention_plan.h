// Makes the plan of a step's attention.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"

namespace quire {

// One step's sequences. `block_tables` is read during the calls too.
struct AttentionStep {
  const int64_t* num_cached_tokens;  // [num_sequences]; none if `is_two_sided`
  const int64_t* num_tokens;         // [num_sequences], each at least 1
  int64_t num_sequences;
  const int32_t* block_tables;  // [num_sequences, table_stride]
  int64_t table_stride;
  int32_t block_size;
  bool is_two_sided = false;  // a token also sees those behind it, with a window `window - 1` of them; no blocks are shared

  // Sparse attention. Null: no sequence skips or selects anything.
  const int64_t* skipped_start = nullptr;  // [num_sequences] first of the cached tokens that a sequence's tokens do not see
  const int64_t* skipped_end =
      nullptr;  // [num_sequences] end of these, at most num_cached_tokens; skipped_start or less: there are none
  const int64_t* selecting_end = nullptr;  // [num_sequences] the tokens before this position select key blocks
  int32_t key_block_size = 0;
  int32_t stride = 0;
  float threshold = 0.0f;
};

// Sequences are ordered by their block tables, so that those with a common prefix are neighbours; neighbours with a common
// first tile share row blocks, and read and pack what they have in common once.
class AttentionPlanner {
 public:
  AttentionPlanner(const AttentionStep& step, int window, int group);

  // Makes the plan anew of what the step's arrays hold now.
  void make();

  // Without the tokens that select key blocks, as long as these are not chosen.
  const AttentionPlan& plan() const { return plan_; }

  const KeySelection& selection() const { return selection_; }

  // Chooses the key blocks of one layer and makes the plan anew. Where masses are not finite, every block is chosen.
  void choose(const double* masses, int64_t num_heads, ThreadPool& pool);

 private:
  struct Segment;  // tokens of one sequence in a row block

  std::vector<int32_t> order_by_tables() const;
  const int32_t* table(int32_t sequence) const { return step_.block_tables + sequence * step_.table_stride; }
  int64_t last_seen(int64_t sequence, int64_t position) const;
  int64_t first_seen(int64_t last_seen) const;
  int64_t num_selecting(int64_t sequence) const;
  bool skips(int32_t sequence) const;
  bool can_follow(const Segment& last, const Segment& next) const;
  bool same_blocks(int32_t a, int32_t b, int64_t first_key, int64_t last_key) const;
  void add_query_blocks(int32_t sequence, int64_t first_row);
  void add_block(const std::vector<Segment>& segments, int64_t first_token, int32_t query_head, const bool* is_chosen);
  void add_visits(const std::vector<Segment>& segments, int64_t tile, size_t first_visit);
  void add_visit(const AttentionVisit& visit, size_t first_visit);
  void put_long_blocks_first();
  void publish();

  const AttentionStep step_;
  const int64_t window_;
  const int group_;
  std::vector<AttentionToken> tokens_;
  std::vector<RowBlock> blocks_;
  std::vector<AttentionSpan> spans_;
  std::vector<AttentionVisit> visits_;
  std::vector<QueryBlock> query_blocks_;
  std::unique_ptr<bool[]> is_chosen_;                                // as the masses
  size_t num_shared_blocks_, num_shared_spans_, num_shared_visits_;  // those that all layers have
  AttentionPlan plan_;
  KeySelection selection_;
};

}  // namespace quire
