// What sampling asks of rows of logits against plain loops, for all instruction sets, for vocabularies with all kinds of rests;
// and the same bits on any number of threads.
#include "sampling.h"

#include <algorithm>
#include <limits>

#include "check.h"

using namespace quire;
using namespace quire::test;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows with many equal logits, some of them -inf, and others' numbers between the rows, which are asked for in another order.
struct Batch {
  int64_t num_rows, vocab_size, stride;
  std::vector<float> logits;
  std::vector<int64_t> order;

  Batch(int64_t rows, int64_t vocab) : num_rows(rows), vocab_size(vocab), stride(vocab + 3) {
    logits.assign((rows - 1) * stride + vocab, std::nanf(""));
    for (int64_t row = 0; row < rows; ++row) {
      const float levels = row % 2 ? 8.0f : 1000.0f;
      std::vector<float> numbers = random_floats(vocab, 3.0f);
      for (float& number : numbers) number = std::round(number * levels) / levels;
      if (row % 3 == 2) std::fill(numbers.begin() + (vocab + 1) / 2, numbers.end(), -kInfinity);
      std::copy(numbers.begin(), numbers.end(), logits.begin() + row * stride);
      order.insert(order.begin(), row);
    }
  }
  LogitRows rows() const { return {logits.data(), stride, order.data(), num_rows, vocab_size}; }
};

// Token ids by logit falling, then by id.
std::vector<int64_t> sorted_ids(const float* row, int64_t vocab_size) {
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < vocab_size; ++id) ids.push_back(id);
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
  return ids;
}

void check_largest(const Kernels& kernels, ThreadPool& pool, const Batch& batch) {
  const LogitRows rows = batch.rows();
  std::vector<int64_t> ids(rows.num_rows);
  std::vector<float> maxima(rows.num_rows);
  LargestCall call{rows, ids.data(), maxima.data(), nullptr};
  Aligned scratch(call.scratch_bytes());
  call.scratch = scratch.data;
  kernels.largest(call, pool);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const float* logits = rows.row(row);
    const int64_t expected = std::max_element(logits, logits + rows.vocab_size) - logits;
    CHECK(ids[row] == expected && maxima[row] == logits[expected], "%s: token %ld, not %ld", kernels.instruction_set,
          static_cast<long>(ids[row]), static_cast<long>(expected));
  }
}

void check_likeliest(const Kernels& kernels, ThreadPool& pool, const Batch& batch) {
  const LogitRows rows = batch.rows();
  std::vector<float> logits(rows.num_rows * kMaxHeadTokens);
  std::vector<int64_t> ids(logits.size()), counts(rows.num_rows);
  std::vector<uint8_t> is_complete(rows.num_rows);
  LikeliestCall call{rows, logits.data(), ids.data(), counts.data(), is_complete.data(), nullptr};
  Aligned scratch(call.scratch_bytes(pool.num_threads()));
  call.scratch = scratch.data;
  kernels.likeliest(call, pool);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const float* of_row = rows.row(row);
    const std::vector<int64_t> expected = sorted_ids(of_row, rows.vocab_size);
    const int64_t num_finite = std::count_if(of_row, of_row + rows.vocab_size, [](float logit) { return logit > -kInfinity; });
    CHECK(!is_complete[row] || counts[row] == num_finite, "%s: %ld of %ld tokens are all", kernels.instruction_set,
          static_cast<long>(counts[row]), static_cast<long>(num_finite));
    CHECK(is_complete[row] || counts[row] == 0 || counts[row] >= std::min(kMinHeadTokens, num_finite), "%s: only %ld tokens",
          kernels.instruction_set, static_cast<long>(counts[row]));
    for (int64_t place = 0; place < kMaxHeadTokens; ++place) {
      const bool is_there = place < counts[row];
      const int64_t id = ids[row * kMaxHeadTokens + place];
      CHECK(id == (is_there ? expected[place] : 0), "%s: token %ld", kernels.instruction_set, static_cast<long>(id));
      CHECK(logits[row * kMaxHeadTokens + place] == (is_there ? of_row[id] : -kInfinity), "%s", kernels.instruction_set);
    }
  }
}

std::vector<double> check_sum_exp(const Kernels& kernels, ThreadPool& pool, const Batch& batch) {
  const LogitRows rows = batch.rows();
  std::vector<float> maxima;
  std::vector<double> temperatures, sums(rows.num_rows);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    maxima.push_back(*std::max_element(rows.row(row), rows.row(row) + rows.vocab_size));
    temperatures.push_back(row == 0 ? 1.0 : 0.3 * static_cast<double>(row));
  }
  SumExpCall call{rows, maxima.data(), temperatures.data(), sums.data(), nullptr};
  Aligned scratch(call.scratch_bytes());
  call.scratch = scratch.data;
  kernels.sum_exp(call, pool);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    double expected = 0.0;
    for (int64_t id = 0; id < rows.vocab_size; ++id) {
      expected += std::exp((static_cast<double>(rows.row(row)[id]) - maxima[row]) / temperatures[row]);
    }
    CHECK(std::fabs(sums[row] - expected) <= 1e-12 * expected, "%s: %.17g, not %.17g", kernels.instruction_set, sums[row],
          expected);
  }
  return sums;
}

void check_ranks(const Kernels& kernels, ThreadPool& pool, const Batch& batch) {
  const LogitRows rows = batch.rows();
  std::vector<int64_t> ids, places(rows.num_rows);
  for (int64_t row = 0; row < rows.num_rows; ++row)
    ids.push_back(row == 0 ? rows.vocab_size - 1 : random_int(0, rows.vocab_size - 1));
  RanksCall call{rows, ids.data(), places.data(), nullptr};
  Aligned scratch(call.scratch_bytes());
  call.scratch = scratch.data;
  kernels.ranks(call, pool);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const std::vector<int64_t> sorted = sorted_ids(rows.row(row), rows.vocab_size);
    const int64_t expected = std::find(sorted.begin(), sorted.end(), ids[row]) - sorted.begin() + 1;
    CHECK(places[row] == expected, "%s: place %ld, not %ld", kernels.instruction_set, static_cast<long>(places[row]),
          static_cast<long>(expected));
  }
}

// A row with a NaN gives its first one, and the others are as ever.
void a_nan_is_found(const Kernels& kernels, ThreadPool& pool) {
  const int64_t vocab_size = kPieceTokens + 700;
  for (const int64_t place : {int64_t{0}, int64_t{1023}, kPieceTokens - 1, kPieceTokens, vocab_size - 1}) {
    std::vector<float> logits(2 * vocab_size, 1.0f);
    for (int64_t id = place; id < vocab_size; id += 300) logits[id] = std::nanf("");
    std::vector<int64_t> ids(2);
    std::vector<float> maxima(2);
    LargestCall call{{logits.data(), vocab_size, nullptr, 2, vocab_size}, ids.data(), maxima.data(), nullptr};
    Aligned scratch(call.scratch_bytes());
    call.scratch = scratch.data;
    kernels.largest(call, pool);
    CHECK(ids[0] == place && std::isnan(maxima[0]), "%s: token %ld", kernels.instruction_set, static_cast<long>(ids[0]));
    CHECK(ids[1] == 0 && maxima[1] == 1.0f, "%s: a NaN spread", kernels.instruction_set);
  }
}

int main() {
  ThreadPool one(1), three(3);
  for (const Kernels* kernels : all_kernels()) {
    for (const int64_t vocab_size : {1, 5, 16, 17, 512, 513, 1300, 9000, 40003}) {
      const Batch batch(vocab_size < 1000 ? 7 : 4, vocab_size);
      for (ThreadPool* pool : {&one, &three}) {
        check_largest(*kernels, *pool, batch);
        check_likeliest(*kernels, *pool, batch);
        check_ranks(*kernels, *pool, batch);
      }
      CHECK(same_bits(check_sum_exp(*kernels, one, batch), check_sum_exp(*kernels, three, batch)), "%s: threads count",
            kernels->instruction_set);
    }
    a_nan_is_found(*kernels, three);
  }
}
