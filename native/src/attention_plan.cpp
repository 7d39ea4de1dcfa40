#include "attention_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace quire {

struct AttentionPlanner::Segment {
  int32_t sequence;
  int32_t first_token;  // of the row block
  int32_t num_tokens;
  int64_t first_position;  // the last place that its first token sees; one more for each that follows
  int64_t num_keys;        // places of the sequence

  int64_t last_position() const { return std::min(first_position + num_tokens, num_keys) - 1; }
};

namespace {

// The last block is the query block's own.
void choose_blocks(const double* masses, int32_t count, float threshold, bool* is_chosen) {
  double total = 0.0;
  for (int32_t i = 0; i < count && count > 2; ++i) total += masses[i];
  const bool is_choice = count > 2 && std::isfinite(total);
  std::fill(is_chosen, is_chosen + count, !is_choice);
  if (!is_choice) return;
  is_chosen[0] = is_chosen[count - 1] = true;
  std::vector<int32_t> order(count - 2);
  std::iota(order.begin(), order.end(), 1);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return masses[a] != masses[b] ? masses[a] > masses[b] : a < b; });
  double chosen = masses[0] + masses[count - 1];
  for (const int32_t block : order) {
    if (!(chosen < threshold * total)) break;
    is_chosen[block] = true;
    chosen += masses[block];
  }
}

}  // namespace

AttentionPlanner::AttentionPlanner(const AttentionStep& step, int window, int group)
    : step_(step), window_(step.is_two_sided && window > 0 ? 2 * int64_t{window} - 1 : window), group_(group) {
  make();
}

void AttentionPlanner::make() {
  const AttentionStep& step = step_;
  tokens_.clear();
  blocks_.clear();
  spans_.clear();
  visits_.clear();
  query_blocks_.clear();
  selection_ = {nullptr, 0, 0, 0, step.key_block_size, step.stride, step.threshold};
  const int64_t tokens_per_block = std::max(1, kBlockRows / group_);
  std::vector<int64_t> first_row(step.num_sequences + 1, 0);
  std::partial_sum(step.num_tokens, step.num_tokens + step.num_sequences, first_row.begin() + 1);
  std::vector<Segment> segments;
  int64_t num_open = 0;  // tokens of the segments
  const auto close = [&] {
    if (!segments.empty()) add_block(segments, static_cast<int64_t>(tokens_.size()) - num_open, kAllHeads, nullptr);
    segments.clear();
    num_open = 0;
  };
  for (const int32_t sequence : order_by_tables()) {
    const int64_t count = step.num_tokens[sequence];
    for (int64_t done = num_selecting(sequence); done < count;) {
      const int64_t position = last_seen(sequence, step.num_cached_tokens[sequence] + done);
      Segment next{sequence, static_cast<int32_t>(num_open), 0, position, step.num_cached_tokens[sequence] + count};
      next.num_tokens = static_cast<int32_t>(std::min(count - done, tokens_per_block - num_open));
      if (!segments.empty() && (next.num_tokens == 0 || !can_follow(segments.back(), next))) {
        close();
        continue;
      }
      for (int32_t i = 0; i < next.num_tokens; ++i) {
        const int64_t row = first_row[sequence] + done + i;
        const int64_t place = step.num_cached_tokens[sequence] + done + i;
        tokens_.push_back({static_cast<int32_t>(row), static_cast<int32_t>(position + i), static_cast<int32_t>(place)});
      }
      segments.push_back(next);
      num_open += next.num_tokens;
      done += next.num_tokens;
    }
  }
  close();
  put_long_blocks_first();
  for (int32_t sequence = 0; sequence < step.num_sequences; ++sequence) add_query_blocks(sequence, first_row[sequence]);
  num_shared_blocks_ = blocks_.size();
  num_shared_spans_ = spans_.size();
  num_shared_visits_ = visits_.size();
  publish();
}

void AttentionPlanner::publish() {
  plan_ = {tokens_.data(),
           blocks_.data(),
           spans_.data(),
           visits_.data(),
           static_cast<int64_t>(tokens_.size()),
           static_cast<int64_t>(blocks_.size()),
           static_cast<int64_t>(blocks_.size() - num_shared_blocks_),
           static_cast<int64_t>(spans_.size()),
           static_cast<int64_t>(visits_.size()),
           step_.block_tables,
           step_.table_stride,
           step_.block_size,
           static_cast<int32_t>(window_),
           group_};
  selection_.blocks = query_blocks_.data();
  selection_.num_blocks = static_cast<int64_t>(query_blocks_.size());
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

// The first tokens of a sequence that select key blocks.
int64_t AttentionPlanner::num_selecting(int64_t sequence) const {
  if (step_.selecting_end == nullptr) return 0;
  const int64_t count = step_.selecting_end[sequence] - step_.num_cached_tokens[sequence];
  return std::max<int64_t>(0, std::min(count, step_.num_tokens[sequence]));
}

bool AttentionPlanner::skips(int32_t sequence) const {
  return step_.skipped_end != nullptr && step_.skipped_start[sequence] < step_.skipped_end[sequence];
}

void AttentionPlanner::add_query_blocks(int32_t sequence, int64_t first_row) {
  const int64_t cached = step_.num_cached_tokens[sequence], end = cached + num_selecting(sequence);
  const int64_t size = step_.key_block_size;
  for (int64_t position = cached; position < end;) {
    const int64_t own_end = round_up(position + 1, size), stop = std::min(own_end, end);
    QueryBlock block{};
    block.sequence = sequence;
    block.first_row = static_cast<int32_t>(first_row + position - cached);
    block.num_tokens = static_cast<int32_t>(stop - position);
    block.first_position = static_cast<int32_t>(position);
    block.first_token = static_cast<int32_t>(tokens_.size());
    block.num_keys = static_cast<int32_t>(std::min(own_end, cached + step_.num_tokens[sequence]));
    block.num_key_blocks = static_cast<int32_t>(own_end / size);
    block.first_mass = selection_.num_masses;
    selection_.num_masses += block.num_key_blocks;
    selection_.max_keys = std::max<int64_t>(selection_.max_keys, own_end);
    for (; position < stop; ++position) {
      const int64_t row = first_row + position - cached;
      tokens_.push_back({static_cast<int32_t>(row), static_cast<int32_t>(position), static_cast<int32_t>(position)});
    }
    query_blocks_.push_back(block);
  }
}

// The last place that the token at a place sees. It may be beyond the end, so that it rises by one from token to token.
int64_t AttentionPlanner::last_seen(int64_t sequence, int64_t position) const {
  if (!step_.is_two_sided) return position;
  return position + (window_ == 0 ? step_.num_tokens[sequence] - 1 : window_ / 2);
}

int64_t AttentionPlanner::first_seen(int64_t last_seen) const {
  return window_ == 0 ? 0 : std::max<int64_t>(0, last_seen - window_ + 1);
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
  if (step_.is_two_sided) return false;
  if (skips(last.sequence) || skips(next.sequence)) return false;
  const int64_t first_key = std::max(first_seen(last.first_position), first_seen(next.first_position));
  const int64_t last_key = first_key / kTileTokens * kTileTokens + kTileTokens - 1;
  if (first_seen(last.first_position) / kTileTokens != first_seen(next.first_position) / kTileTokens) return false;
  if (std::min(last.last_position(), next.last_position()) < last_key) return false;
  return same_blocks(last.sequence, next.sequence, first_key, last_key);
}

// `is_chosen`: of each key block; null: all are.
void AttentionPlanner::add_block(const std::vector<Segment>& segments, int64_t first_token, int32_t query_head,
                                 const bool* is_chosen) {
  constexpr int64_t kTilesPerSpan = kSpanTokens / kTileTokens;
  int64_t first_tile = INT64_MAX, last_tile = 0;
  int32_t num_tokens = 0;
  for (const Segment& segment : segments) {
    first_tile = std::min(first_tile, first_seen(segment.first_position) / kTileTokens);
    last_tile = std::max(last_tile, segment.last_position() / kTileTokens);
    num_tokens += segment.num_tokens;
  }
  const size_t first_span = spans_.size();
  int64_t span = -1;  // number of the last one
  for (int64_t tile = first_tile; tile <= last_tile; ++tile) {
    if (is_chosen != nullptr && !is_chosen[tile * kTileTokens / step_.key_block_size]) continue;
    const size_t first_visit = visits_.size();
    add_visits(segments, tile, first_visit);
    if (visits_.size() == first_visit) continue;
    if (tile / kTilesPerSpan != span) spans_.push_back({static_cast<int32_t>(first_visit), 0});
    span = tile / kTilesPerSpan;
    spans_.back().num_visits = static_cast<int32_t>(visits_.size()) - spans_.back().first_visit;
  }
  blocks_.push_back({static_cast<int32_t>(first_token), num_tokens, static_cast<int32_t>(first_span),
                     static_cast<int32_t>(spans_.size() - first_span), query_head});
}

void AttentionPlanner::add_visits(const std::vector<Segment>& segments, int64_t tile, size_t first_visit) {
  const int64_t start = tile * kTileTokens;
  const int64_t last_viewer = window_ == 0 ? INT64_MAX : start + kTileTokens - 1 + window_ - 1;
  for (const Segment& segment : segments) {
    const int64_t first = std::max(segment.first_position, start);
    const int64_t last = std::min(segment.first_position + segment.num_tokens - 1, last_viewer);
    if (first > last) continue;
    AttentionVisit visit{};
    visit.first_token = segment.first_token + static_cast<int32_t>(first - segment.first_position);
    visit.num_tokens = static_cast<int32_t>(last - first + 1);
    visit.tile = static_cast<int32_t>(tile);
    visit.sequence = segment.sequence;
    const int64_t first_key = std::max<int64_t>(0, first_seen(first) - start);
    const int64_t end_key = std::min<int64_t>(kTileTokens, std::min(last + 1, segment.num_keys) - start);
    int64_t skipped_start = end_key, skipped_end = first_key;
    if (skips(segment.sequence)) {
      skipped_start = std::min(end_key, step_.skipped_start[segment.sequence] - start);
      skipped_end = std::max(first_key, step_.skipped_end[segment.sequence] - start);
    }
    const auto add_keys = [&](int64_t from, int64_t to) {
      if (from >= to) return;
      visit.first_key = static_cast<int32_t>(from);
      visit.end_key = static_cast<int32_t>(to);
      add_visit(visit, first_visit);
    };
    if (skipped_start >= skipped_end) {
      add_keys(first_key, end_key);
    } else {
      add_keys(first_key, skipped_start);
      add_keys(skipped_end, end_key);
    }
  }
}

// Joins it to the last one of the tile if it goes on where that ends, with the same keys.
void AttentionPlanner::add_visit(const AttentionVisit& visit, size_t first_visit) {
  if (visits_.size() > first_visit) {
    AttentionVisit& run = visits_.back();
    const int64_t start = static_cast<int64_t>(visit.tile) * kTileTokens;
    const auto entry = [&](int32_t key) { return (start + key) / step_.block_size; };
    const bool is_joined = run.first_token + run.num_tokens == visit.first_token &&
                           entry(run.first_key) == entry(visit.first_key) && entry(run.end_key - 1) == entry(visit.end_key - 1) &&
                           same_blocks(run.sequence, visit.sequence, start + visit.first_key, start + visit.end_key - 1);
    if (is_joined) {
      run.num_tokens += visit.num_tokens;
      run.first_key = std::min(run.first_key, visit.first_key);
      run.end_key = std::max(run.end_key, visit.end_key);
      return;
    }
  }
  visits_.push_back(visit);
}

void AttentionPlanner::choose(const double* masses, int64_t num_heads, ThreadPool& pool) {
  is_chosen_.reset(new bool[num_heads * selection_.num_masses]);
  parallel_for(pool, static_cast<int64_t>(query_blocks_.size()) * num_heads, [&](int64_t task, int) {
    const QueryBlock& block = query_blocks_[task / num_heads];
    const int64_t start = num_heads * block.first_mass + task % num_heads * block.num_key_blocks;
    choose_blocks(masses + start, block.num_key_blocks, selection_.threshold, is_chosen_.get() + start);
  });
  blocks_.resize(num_shared_blocks_);
  spans_.resize(num_shared_spans_);
  visits_.resize(num_shared_visits_);
  std::vector<Segment> segment(1);
  for (const QueryBlock& block : query_blocks_) {
    for (int32_t head = 0; head < num_heads; ++head) {
      const bool* is_chosen = is_chosen_.get() + num_heads * block.first_mass + head * block.num_key_blocks;
      for (int32_t done = 0; done < block.num_tokens; done += kBlockRows) {
        segment[0] = {block.sequence, 0, std::min(block.num_tokens - done, kBlockRows), block.first_position + done,
                      block.num_keys};
        add_block(segment, block.first_token + done, head, is_chosen);
      }
    }
  }
  publish();
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
