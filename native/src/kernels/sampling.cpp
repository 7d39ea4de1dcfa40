// See sampling.h. Compiled once for each instruction set.
#include "sampling.h"

#include "rows.h"

namespace quire::QUIRE_ISA {
namespace {

using f64x8 = Vector<double, kLanes / 2>;
using i64x8 = Vector<int64_t, kLanes / 2>;

constexpr int64_t kBlockTokens = 1024;  // of which one search is made when the largest logit of a piece is known
constexpr float kLowest = -3.40282347e38f;
constexpr float kInfinity = __builtin_inff();

// `lanes` hold 0 or -1.
QUIRE_INLINE bool any_of_lanes(i32x16 lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bits_as<__m512i>(lanes), bits_as<__m512i>(lanes)) != 0;
#else
  const auto half = low_half(lanes) | high_half(lanes);
  const auto quarter = low_half(half) | high_half(half);
  return (quarter[0] | quarter[1] | quarter[2] | quarter[3]) != 0;
#endif
}

QUIRE_INLINE f32x16 load_logits(const float* from, int64_t left) {
  return left >= kLanes ? load(from) : load_some(from, static_cast<int>(left), -kInfinity);
}

// Calls visit(row, piece, begin, end) for all pieces of all rows, begin and end being tokens.
template <class Visit>
void for_each_piece(const LogitRows& rows, ThreadPool& pool, const Visit& visit) {
  const int64_t num_pieces = rows.num_pieces();
  for_each_row(pool, rows.num_rows * num_pieces, min(rows.vocab_size, kPieceTokens), [&](int64_t index) {
    const int64_t piece = index % num_pieces;
    visit(index / num_pieces, piece, piece * kPieceTokens, min((piece + 1) * kPieceTokens, rows.vocab_size));
  });
}

// -- the largest logit ---------------------------------------------------------------------------------------------------

QUIRE_INLINE float largest_of(const float* from, int64_t count, bool& has_nan) {
  f32x16 largest[4];
  i32x16 nans[4] = {};
  for (int i = 0; i < 4; ++i) largest[i] = splat(-kInfinity);
  int64_t column = 0;
  for (; column + 4 * kLanes <= count; column += 4 * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const f32x16 logits = load(from + column + i * kLanes);
      largest[i] = maximum(logits, largest[i]);
      nans[i] |= logits != logits;
    }
  }
  for (; column < count; column += kLanes) {
    const f32x16 logits = load_logits(from + column, count - column);
    largest[0] = maximum(logits, largest[0]);
    nans[0] |= logits != logits;
  }
  has_nan = any_of_lanes(nans[0] | nans[1] | nans[2] | nans[3]);
  return max_of_lanes(maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3])));
}

Token largest_of_piece(const float* row, int64_t begin, int64_t end) {
  float best = -kInfinity;
  int64_t best_block = begin;
  bool has_nan = false;
  for (int64_t block = begin; block < end && !has_nan; block += kBlockTokens) {
    const float largest = largest_of(row + block, min(end - block, kBlockTokens), has_nan);
    if (largest > best || has_nan) {
      best = largest;
      best_block = block;
    }
  }
  int64_t id = best_block;
  while (has_nan ? row[id] == row[id] : row[id] != best) ++id;
  return {row[id], static_cast<int32_t>(id)};
}

// -- the likeliest tokens ------------------------------------------------------------------------------------------------

// Appends the tokens of [begin, end) that reach the threshold; returns the new count, which is over kMaxHeadTokens if they are
// too many.
int64_t take_tokens(const float* row, int64_t begin, int64_t end, float threshold, Token* tokens, int64_t count) {
  for (int64_t column = begin; column < end; column += kLanes) {
    if (!any_of_lanes(load_logits(row + column, end - column) >= threshold)) continue;
    for (int64_t id = column; id < min(column + kLanes, end); ++id) {
      if (!(row[id] >= threshold)) continue;
      if (count == kMaxHeadTokens) return count + 1;
      tokens[count++] = {row[id], static_cast<int32_t>(id)};
    }
  }
  return count;
}

void write_head(const LikeliestCall& call, int64_t index, const Token* tokens, int64_t count) {
  float* logits = call.logits + index * kMaxHeadTokens;
  int64_t* token_ids = call.token_ids + index * kMaxHeadTokens;
  for (int64_t place = 0; place < kMaxHeadTokens; ++place) {
    logits[place] = place < count ? tokens[place].logit : -kInfinity;
    token_ids[place] = place < count ? tokens[place].id : 0;
  }
  call.counts[index] = count;
}

// -- sums of probabilities -----------------------------------------------------------------------------------------------

// exp of numbers up to 0, within 2 ulp; 0 below -708.
QUIRE_INLINE f64x8 exp_of_negative(f64x8 x) {
  const auto vanishes = x < -708.0;
  x = select(vanishes, f64x8{}, x);
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: a sum with it has a whole number in its low bits
  const f64x8 shifted = x * 1.4426950408889634 + kRound;
  const f64x8 power = shifted - kRound;
  // ln 2 in two parts, of which the first has few bits: its product with `power` is exact.
  const f64x8 rest = (x - power * 0x1.62e42feep-1) - power * 0x1.a39ef35793c76p-33;
  // The exponential series; what follows its 13th power is below the last bit for |rest| < 0.35.
  f64x8 sum = rest * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  sum = sum * rest + 1.0 / 39916800.0;
  sum = sum * rest + 1.0 / 3628800.0;
  sum = sum * rest + 1.0 / 362880.0;
  sum = sum * rest + 1.0 / 40320.0;
  sum = sum * rest + 1.0 / 5040.0;
  sum = sum * rest + 1.0 / 720.0;
  sum = sum * rest + 1.0 / 120.0;
  sum = sum * rest + 1.0 / 24.0;
  sum = sum * rest + 1.0 / 6.0;
  sum = sum * rest + 0.5;
  sum = sum * rest + 1.0;
  sum = sum * rest + 1.0;
  const f64x8 scale = bits_as<f64x8>((bits_as<i64x8>(shifted) + 1023) << 52);
  return select(vanishes, f64x8{}, sum * scale);
}

double sum_exp_of(const float* from, int64_t count, double maximum, double temperature) {
  f64x8 sums[2] = {};
  for (int64_t column = 0; column < count; column += kLanes) {
    const f32x16 logits = load_logits(from + column, count - column);
    const auto low = low_half(logits), high = high_half(logits);
    for (int half = 0; half < 2; ++half) {
      f64x8 exponents = convert<f64x8>(half == 0 ? low : high) - maximum;
      if (temperature != 1.0) exponents /= temperature;
      sums[half] += exp_of_negative(exponents);
    }
  }
  const f64x8 both = sums[0] + sums[1];
  return ((both[0] + both[4]) + (both[2] + both[6])) + ((both[1] + both[5]) + (both[3] + both[7]));
}

// -- ranks ---------------------------------------------------------------------------------------------------------------

// Returns how many of `count` logits are above `limit`, or reach it.
template <bool kOrEqual>
int64_t count_above(const float* from, int64_t count, float limit) {
  i32x16 found = {};
  int64_t column = 0;
  for (; column + kLanes <= count; column += kLanes) {
    const f32x16 logits = load(from + column);
    found -= kOrEqual ? logits >= limit : logits > limit;
  }
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += found[lane];
  for (; column < count; ++column) total += kOrEqual ? from[column] >= limit : from[column] > limit;
  return total;
}

}  // namespace

void largest(const LargestCall& call, ThreadPool& pool) {
  const LogitRows& rows = call.rows;
  Token* pieces = reinterpret_cast<Token*>(call.scratch);
  for_each_piece(rows, pool, [&](int64_t row, int64_t piece, int64_t begin, int64_t end) {
    pieces[row * rows.num_pieces() + piece] = largest_of_piece(rows.row(row), begin, end);
  });
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const Token* of_row = pieces + row * rows.num_pieces();
    Token best = of_row[0];
    for (int64_t piece = 1; piece < rows.num_pieces() && best.logit == best.logit; ++piece) {
      if (!(of_row[piece].logit <= best.logit)) best = of_row[piece];
    }
    call.token_ids[row] = best.id;
    call.logits[row] = best.logit;
  }
}

void likeliest(const LikeliestCall& call, ThreadPool& pool) {
  const LogitRows& rows = call.rows;
  const int64_t group_size = call.group_size(), num_groups = call.num_groups();
  float* maxima = reinterpret_cast<float*>(call.scratch);
  float* to_order = maxima + rows.num_rows * num_groups;
  Token* taken = reinterpret_cast<Token*>(to_order + pool.num_threads() * num_groups);
  const bool has_threshold = rows.vocab_size > kMinGroups;
  if (has_threshold) {
    const int64_t groups_per_task = kPieceTokens / group_size + 1;
    const int64_t tasks_per_row = ceil_div(num_groups, groups_per_task);
    parallel_for(pool, rows.num_rows * tasks_per_row, [&](int64_t task, int) {
      const int64_t row = task / tasks_per_row;
      const int64_t first = task % tasks_per_row * groups_per_task;
      for (int64_t group = first; group < min(first + groups_per_task, num_groups); ++group) {
        bool has_nan;
        const int64_t begin = group * group_size;
        maxima[row * num_groups + group] = largest_of(rows.row(row) + begin, min(group_size, rows.vocab_size - begin), has_nan);
      }
    });
  }
  parallel_for(pool, rows.num_rows, [&](int64_t row, int thread) {
    const float* of_row = maxima + row * num_groups;
    float threshold = kLowest;
    if (has_threshold) {
      float* ordered = to_order + thread * num_groups;
      std::memcpy(ordered, of_row, num_groups * sizeof(float));
      const float reached = nth_largest(ordered, num_groups, kMinHeadTokens);
      if (reached > threshold) threshold = reached;
    }
    Token* tokens = taken + thread * (kMaxHeadTokens + 1);
    int64_t count = 0;
    for (int64_t group = 0; group < num_groups && count <= kMaxHeadTokens; ++group) {
      if (has_threshold && of_row[group] < threshold) continue;
      const int64_t begin = group * group_size;
      count = take_tokens(rows.row(row), begin, min(begin + group_size, rows.vocab_size), threshold, tokens, count);
    }
    const bool is_crowded = count > kMaxHeadTokens;
    if (is_crowded) count = 0;
    sort_tokens(tokens, count);
    write_head(call, row, tokens, count);
    call.is_complete[row] = threshold == kLowest && !is_crowded;
  });
}

void sum_exp(const SumExpCall& call, ThreadPool& pool) {
  const LogitRows& rows = call.rows;
  double* pieces = reinterpret_cast<double*>(call.scratch);
  for_each_piece(rows, pool, [&](int64_t row, int64_t piece, int64_t begin, int64_t end) {
    pieces[row * rows.num_pieces() + piece] =
        sum_exp_of(rows.row(row) + begin, end - begin, call.maxima[row], call.temperatures[row]);
  });
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    double sum = 0.0;
    for (int64_t piece = 0; piece < rows.num_pieces(); ++piece) sum += pieces[row * rows.num_pieces() + piece];
    call.sums[row] = sum;
  }
}

void ranks(const RanksCall& call, ThreadPool& pool) {
  const LogitRows& rows = call.rows;
  int64_t* pieces = reinterpret_cast<int64_t*>(call.scratch);
  for_each_piece(rows, pool, [&](int64_t row, int64_t piece, int64_t begin, int64_t end) {
    const float* logits = rows.row(row);
    const int64_t id = call.token_ids[row];
    const int64_t middle = id < begin ? begin : min(id, end);
    pieces[row * rows.num_pieces() + piece] = count_above<true>(logits + begin, middle - begin, logits[id]) +
                                              count_above<false>(logits + middle, end - middle, logits[id]);
  });
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    int64_t rank = 1;
    for (int64_t piece = 0; piece < rows.num_pieces(); ++piece) rank += pieces[row * rows.num_pieces() + piece];
    call.ranks[row] = rank;
  }
}

}  // namespace quire::QUIRE_ISA
