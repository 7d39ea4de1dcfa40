#include "attention_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace quire {

struct AttentionPlanner::Segment {
  int32_t sequence;
  int32_t first_token;  // of the row block
  int32_t num_tokens;
  int64_t first_position;

  int64_t last_position() const { return first_position + num_tokens - 1; }
};

AttentionPlanner::AttentionPlanner(const AttentionStep& step, int window, int group) : step_(step), window_(window) {
  const int64_t tokens_per_block = std::max(1, kBlockRows / group);
  std::vector<int64_t> first_row(step.num_sequences + 1, 0);
  std::partial_sum(step.num_tokens, step.num_tokens + step.num_sequences, first_row.begin() + 1);
  std::vector<Segment> segments;
  int64_t num_open = 0;  // tokens of the segments
  const auto close = [&] {
    if (!segments.empty()) add_block(segments);
    segments.clear();
    num_open = 0;
  };
  for (const int32_t sequence : order_by_tables()) {
    const int64_t count = step.num_tokens[sequence];
    for (int64_t done = 0; done < count;) {
      const int64_t position = step.num_cached_tokens[sequence] + done;
      Segment next{sequence, static_cast<int32_t>(num_open), 0, position};
      next.num_tokens = static_cast<int32_t>(std::min(count - done, tokens_per_block - num_open));
      if (!segments.empty() && (next.num_tokens == 0 || !can_follow(segments.back(), next))) {
        close();
        continue;
      }
      for (int32_t i = 0; i < next.num_tokens; ++i) {
        const int64_t row = first_row[sequence] + done + i;
        tokens_.push_back({static_cast<int32_t>(row), static_cast<int32_t>(position + i)});
      }
      segments.push_back(next);
      num_open += next.num_tokens;
      done += next.num_tokens;
    }
  }
  close();
  put_long_blocks_first();
  plan_ = {tokens_.data(),
           blocks_.data(),
           spans_.data(),
           visits_.data(),
           static_cast<int64_t>(tokens_.size()),
           static_cast<int64_t>(blocks_.size()),
           static_cast<int64_t>(spans_.size()),
           static_cast<int64_t>(visits_.size()),
           step.block_tables,
           step.table_stride,
           step.block_size,
           window,
           group};
}

std::vector<int32_t> AttentionPlanner::order_by_tables() const {
  std::vector<int32_t> order(step_.num_sequences);
  std::iota(order.begin(), order.end(), 0);
  const auto num_entries = [&](int32_t sequence) {
    return ceil_div(step_.num_cached_tokens[sequence] + step_.num_tokens[sequence], step_.block_size);
  };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const int64_t num_a = num_entries(a), num_b = num_entries(b);
    const int difference = std::memcmp(table(a), table(b), std::min(num_a, num_b) * sizeof(int32_t));
    if (difference != 0) return difference < 0;
    return num_a != num_b ? num_a < num_b : a < b;
  });
  return order;
}

int64_t AttentionPlanner::first_seen(int64_t position) const {
  return window_ == 0 ? 0 : std::max<int64_t>(0, position - window_ + 1);
}

bool AttentionPlanner::same_blocks(int32_t a, int32_t b, int64_t first_key, int64_t last_key) const {
  if (a == b) return true;
  const int64_t first = first_key / step_.block_size;
  const int64_t count = last_key / step_.block_size + 1 - first;
  return std::memcmp(table(a) + first, table(b) + first, count * sizeof(int32_t)) == 0;
}

// Whether the two have the first tile of the later one in common.
bool AttentionPlanner::can_follow(const Segment& last, const Segment& next) const {
  if (last.sequence == next.sequence) return true;
  const int64_t first_key = std::max(first_seen(last.first_position), first_seen(next.first_position));
  const int64_t last_key = first_key / kTileTokens * kTileTokens + kTileTokens - 1;
  if (first_seen(last.first_position) / kTileTokens != first_seen(next.first_position) / kTileTokens) return false;
  if (std::min(last.last_position(), next.last_position()) < last_key) return false;
  return same_blocks(last.sequence, next.sequence, first_key, last_key);
}

void AttentionPlanner::add_block(const std::vector<Segment>& segments) {
  constexpr int64_t kTilesPerSpan = kSpanTokens / kTileTokens;
  int64_t first_tile = INT64_MAX, last_tile = 0, num_tokens = 0;
  for (const Segment& segment : segments) {
    first_tile = std::min(first_tile, first_seen(segment.first_position) / kTileTokens);
    last_tile = std::max(last_tile, segment.last_position() / kTileTokens);
    num_tokens += segment.num_tokens;
  }
  const size_t first_span = spans_.size();
  for (int64_t tile = first_tile; tile <= last_tile; ++tile) {
    if (tile == first_tile || tile % kTilesPerSpan == 0) spans_.push_back({static_cast<int32_t>(visits_.size()), 0});
    add_visits(segments, tile);
    spans_.back().num_visits = static_cast<int32_t>(visits_.size()) - spans_.back().first_visit;
  }
  blocks_.push_back({static_cast<int32_t>(tokens_.size() - num_tokens), static_cast<int32_t>(num_tokens),
                     static_cast<int32_t>(first_span), static_cast<int32_t>(spans_.size() - first_span)});
}

void AttentionPlanner::add_visits(const std::vector<Segment>& segments, int64_t tile) {
  const int64_t start = tile * kTileTokens;
  const int64_t last_viewer = window_ == 0 ? INT64_MAX : start + kTileTokens - 1 + window_ - 1;
  const size_t first_visit = visits_.size();
  for (const Segment& segment : segments) {
    const int64_t first = std::max(segment.first_position, start);
    const int64_t last = std::min(segment.last_position(), last_viewer);
    if (first > last) continue;
    const int32_t first_token = segment.first_token + static_cast<int32_t>(first - segment.first_position);
    const int32_t num_tokens = static_cast<int32_t>(last - first + 1);
    const int32_t first_key = static_cast<int32_t>(std::max<int64_t>(0, first_seen(first) - start));
    const int32_t end_key = static_cast<int32_t>(std::min<int64_t>(kTileTokens, last + 1 - start));
    if (visits_.size() > first_visit) {
      AttentionVisit& run = visits_.back();
      const auto entry = [&](int32_t key) { return (start + key) / step_.block_size; };
      const bool is_joined = run.first_token + run.num_tokens == first_token && entry(run.first_key) == entry(first_key) &&
                             entry(run.end_key - 1) == entry(end_key - 1) &&
                             same_blocks(run.sequence, segment.sequence, start + first_key, start + end_key - 1);
      if (is_joined) {
        run.num_tokens += num_tokens;
        run.first_key = std::min(run.first_key, first_key);
        run.end_key = std::max(run.end_key, end_key);
        continue;
      }
    }
    visits_.push_back({first_token, num_tokens, static_cast<int32_t>(tile), segment.sequence, first_key, end_key});
  }
}

void AttentionPlanner::put_long_blocks_first() {
  const auto num_visits = [&](const RowBlock& block) {
    const AttentionSpan& last = spans_[block.first_span + block.num_spans - 1];
    return last.first_visit + last.num_visits - spans_[block.first_span].first_visit;
  };
  std::stable_sort(blocks_.begin(), blocks_.end(), [&](const RowBlock& a, const RowBlock& b) {
    return static_cast<int64_t>(num_visits(a)) * a.num_tokens > static_cast<int64_t>(num_visits(b)) * b.num_tokens;
  });
}

}  // namespace quire
