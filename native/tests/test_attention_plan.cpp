// What the plan of a step makes of sequences with a common prefix; that its attention is right is for test_attention.cpp.
#include "attention_plan.h"

#include <algorithm>

#include "check.h"

using namespace quire;
using namespace quire::test;

constexpr int32_t kBlockSize = 16;

struct Sequence {
  int64_t length;
  std::vector<int32_t> blocks;
};

// Row blocks in which the last token of each sequence is computed.
int64_t num_row_blocks(const std::vector<Sequence>& sequences) {
  const int64_t count = static_cast<int64_t>(sequences.size());
  constexpr int64_t kStride = 16;
  std::vector<int64_t> num_cached, num_tokens(count, 1);
  std::vector<int32_t> tables(count * kStride, INT32_MAX);
  for (int64_t i = 0; i < count; ++i) {
    num_cached.push_back(sequences[i].length - 1);
    std::copy(sequences[i].blocks.begin(), sequences[i].blocks.end(), tables.begin() + i * kStride);
  }
  const AttentionPlanner planner({num_cached.data(), num_tokens.data(), count, tables.data(), kStride, kBlockSize}, 0, 1);
  CHECK(planner.plan().num_tokens == count, "%ld tokens", static_cast<long>(planner.plan().num_tokens));
  return planner.plan().num_blocks;
}

// A sequence may end where the others part: between them in the batch, it must not keep them apart.
void sequences_meet_in_whatever_order_they_come() {
  const Sequence one{70, {7, 1, 2, 3, 9}}, two{75, {7, 1, 2, 3, 4}}, three{79, {7, 1, 2, 3, 8}}, shorter{16, {7}};
  const std::vector<Sequence> sequences = {one, two, shorter, three};
  std::vector<int> order = {0, 1, 2, 3};
  do {
    std::vector<Sequence> permuted;
    for (const int i : order) permuted.push_back(sequences[i]);
    CHECK(num_row_blocks(permuted) == 2, "%d %d %d %d: not the short one and the others", order[0], order[1], order[2], order[3]);
  } while (std::next_permutation(order.begin(), order.end()));
}

void strangers_stay_apart() {
  CHECK(num_row_blocks({{64, {1, 2, 3, 4}}, {64, {1, 2, 3, 5}}}) == 2, "the first tile is not the same");
  CHECK(num_row_blocks({}) == 0, "of nothing");
}

int main() {
  sequences_meet_in_whatever_order_they_come();
  strangers_stay_apart();
}
