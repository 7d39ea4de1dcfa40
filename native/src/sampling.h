// What sampling asks of whole rows of logits: the largest, the likeliest tokens, sums of probabilities, ranks. No kernel copies
// or changes them.
//
// A row is cut into pieces of kPieceTokens at fixed places, so that all threads can work on one row, and what the pieces give is
// put together in their order: a row's result does not depend on the other rows or on the threads.
#pragma once

#include <cstdint>

#include "thread_pool.h"
#include "types.h"

namespace quire {

constexpr int64_t kPieceTokens = 1 << 14;
constexpr int64_t kMinHeadTokens = 128;  // least tokens in a head that is not complete
constexpr int64_t kMaxHeadTokens = 1024;
constexpr int64_t kMinGroups = 512;

struct LogitRows {
  const float* logits;
  int64_t row_stride;
  const int64_t* rows;  // [num_rows] which of them, or null: all
  int64_t num_rows;
  int64_t vocab_size;

  const float* row(int64_t index) const { return logits + (rows == nullptr ? index : rows[index]) * row_stride; }
  int64_t num_pieces() const { return ceil_div(vocab_size, kPieceTokens); }
};

struct Token {
  float logit;
  int32_t id;
};

// The largest logit of each row and the lowest id that has it. A row with a NaN gives its first NaN.
struct LargestCall {
  LogitRows rows;
  int64_t* token_ids;  // [num_rows]
  float* logits;       // [num_rows]
  char* scratch;

  int64_t scratch_bytes() const { return rows.num_rows * rows.num_pieces() * sizeof(Token); }
};

// Each row's likeliest tokens in order, by logit falling, then by id. The row is cut into groups; all tokens are taken that
// reach the kMinHeadTokens-th largest of the groups' maxima. A row with more than kMaxHeadTokens of those gets none.
struct LikeliestCall {
  LogitRows rows;        // without NaN
  float* logits;         // [num_rows, kMaxHeadTokens], padded with -inf
  int64_t* token_ids;    // the same, padded with 0
  int64_t* counts;       // [num_rows]
  uint8_t* is_complete;  // [num_rows] whether no token with a finite logit is missing
  char* scratch;

  // Tokens of a group, the last one may have fewer: as many as leave kMinGroups groups, and whole vectors if that is over one.
  int64_t group_size() const {
    const int64_t most = rows.vocab_size / kMinGroups;
    return most < 1 ? 1 : most < 16 ? most : most / 16 * 16;
  }
  int64_t num_groups() const { return ceil_div(rows.vocab_size, group_size()); }
  // The groups' maxima of each row; the same again for each thread to put in order; and each thread's tokens.
  int64_t scratch_bytes(int num_threads) const {
    return (rows.num_rows + num_threads) * num_groups() * sizeof(float) + num_threads * (kMaxHeadTokens + 1) * sizeof(Token);
  }
};

// Each row's sum of exp((logit - maximum) / temperature), in float64.
struct SumExpCall {
  LogitRows rows;
  const float* maxima;         // [num_rows], finite
  const double* temperatures;  // [num_rows], above 0
  double* sums;                // [num_rows]
  char* scratch;

  int64_t scratch_bytes() const { return rows.num_rows * rows.num_pieces() * sizeof(double); }
};

// The place of one token of each row, 1 for the likeliest; of equal ones the lower id comes first.
struct RanksCall {
  LogitRows rows;
  const int64_t* token_ids;  // [num_rows]
  int64_t* ranks;            // [num_rows]
  char* scratch;

  int64_t scratch_bytes() const { return rows.num_rows * rows.num_pieces() * sizeof(int64_t); }
};

// Returns the n-th largest of `values`, counted from 1, and puts those in another order.
float nth_largest(float* values, int64_t count, int64_t n);

// Sorts by logit falling, then by id.
void sort_tokens(Token* tokens, int64_t count);

}  // namespace quire
