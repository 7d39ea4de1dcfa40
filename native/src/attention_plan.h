// Makes the plan of a step's attention.
#pragma once

#include <vector>

#include "attention.h"

namespace quire {

// One step's sequences. `block_tables` is read during the calls too.
struct AttentionStep {
  const int64_t* num_cached_tokens;  // [num_sequences]
  const int64_t* num_tokens;         // [num_sequences], each at least 1
  int64_t num_sequences;
  const int32_t* block_tables;  // [num_sequences, table_stride]
  int64_t table_stride;
  int32_t block_size;
};

// Sequences are ordered by their block tables, so that those with a common prefix are neighbours; neighbours with a common
// first tile share row blocks, and read and pack what they have in common once.
class AttentionPlanner {
 public:
  AttentionPlanner(const AttentionStep& step, int window, int group);

  const AttentionPlan& plan() const { return plan_; }

 private:
  struct Segment;  // tokens of one sequence in a row block

  std::vector<int32_t> order_by_tables() const;
  const int32_t* table(int32_t sequence) const { return step_.block_tables + sequence * step_.table_stride; }
  int64_t first_seen(int64_t position) const;
  bool can_follow(const Segment& last, const Segment& next) const;
  bool same_blocks(int32_t a, int32_t b, int64_t first_key, int64_t last_key) const;
  void add_block(const std::vector<Segment>& segments);
  void add_visits(const std::vector<Segment>& segments, int64_t tile);
  void put_long_blocks_first();

  const AttentionStep step_;
  const int64_t window_;
  std::vector<AttentionToken> tokens_;
  std::vector<RowBlock> blocks_;
  std::vector<AttentionSpan> spans_;
  std::vector<AttentionVisit> visits_;
  AttentionPlan plan_;
};

}  // namespace quire
