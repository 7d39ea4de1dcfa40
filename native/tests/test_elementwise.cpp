// Norms and activations against plain loops in double, for all types and instruction sets; and the same bits on any number of
// threads. Memory is of exactly the size needed, for a sanitizer to see a step beyond.
#include "elementwise.h"

#include "check.h"

using namespace quire;
using namespace quire::test;

constexpr double kSmallest = 2e-6;

// Rows with others' numbers between them.
template <class T>
struct Rows {
  int64_t num_rows, num_features, stride;
  std::vector<T> numbers;

  Rows(int64_t rows, int64_t features, float deviation)
      : num_rows(rows),
        num_features(features),
        stride(features + 3),
        numbers(random_numbers<T>((rows - 1) * stride + features, deviation)) {}
  double at(int64_t row, int64_t feature) const { return number_of(numbers[row * stride + feature]); }
};

template <class T>
void check_row(const char* what, const Rows<T>& out, int64_t row, const std::vector<double>& expected) {
  for (int64_t i = 0; i < out.num_features; ++i) {
    const double error = std::fabs(out.at(row, i) - expected[i]);
    CHECK(error <= TypeOf<T>::rounding * std::fabs(expected[i]) + kSmallest, "%s: %.9g instead of %.9g, feature %ld of %ld", what,
          out.at(row, i), expected[i], static_cast<long>(i), static_cast<long>(out.num_features));
  }
}

template <class T>
void check_norm(const Kernels& kernels, int64_t num_rows, int64_t num_features) {
  const Rows<T> before(num_rows, num_features, 2.0f), delta(num_rows, num_features, 1.0f);
  const std::vector<float> weight = random_floats(num_features);
  constexpr float kScale = 0.22f, kEps = 1e-5f;
  std::vector<T> first_result;
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    Rows<T> rows = before, out = before;
    kernels.norm({rows.numbers.data(), delta.numbers.data(), weight.data(), out.numbers.data(), TypeOf<T>::dtype, num_rows,
                  num_features, rows.stride, delta.stride, out.stride, kScale, kEps},
                 pool);
    for (int64_t row = 0; row < num_rows; ++row) {
      std::vector<double> sums, normed;
      double squares = 0.0;
      for (int64_t i = 0; i < num_features; ++i) {
        sums.push_back(before.at(row, i) + delta.at(row, i) * kScale);
        squares += rows.at(row, i) * rows.at(row, i);
      }
      for (int64_t i = 0; i < num_features; ++i) {
        normed.push_back(rows.at(row, i) / std::sqrt(squares / num_features + kEps) * weight[i]);
      }
      check_row(kernels.instruction_set, rows, row, sums);
      check_row(kernels.instruction_set, out, row, normed);
    }
    if (num_threads == 1) first_result = out.numbers;
    CHECK(same_bits(out.numbers, first_result), "%s: a norm depends on the threads", kernels.instruction_set);
    Rows<T> alone = before;
    kernels.norm({alone.numbers.data(), delta.numbers.data(), nullptr, nullptr, TypeOf<T>::dtype, num_rows, num_features,
                  alone.stride, delta.stride, 0, kScale, kEps},
                 pool);
    CHECK(same_bits(alone.numbers, rows.numbers), "%s: the sum depends on the norm after it", kernels.instruction_set);
  }
}

template <class T>
void check_layer_norm(const Kernels& kernels, int64_t num_rows, int64_t num_features) {
  Rows<T> rows(num_rows, num_features, 2.0f), out(num_rows, num_features, 1.0f);
  const std::vector<float> weight = random_floats(num_features), bias = random_floats(num_features);
  constexpr float kEps = 1e-2f;
  ThreadPool pool(3);
  kernels.norm({rows.numbers.data(), nullptr, weight.data(), out.numbers.data(), TypeOf<T>::dtype, num_rows, num_features,
                rows.stride, 0, out.stride, 1.0f, kEps, bias.data()},
               pool);
  for (int64_t row = 0; row < num_rows; ++row) {
    double mean = 0.0, variance = 0.0;
    for (int64_t i = 0; i < num_features; ++i) mean += rows.at(row, i) / num_features;
    for (int64_t i = 0; i < num_features; ++i) variance += std::pow(rows.at(row, i) - mean, 2) / num_features;
    for (int64_t i = 0; i < num_features; ++i) {
      const double scaled = (rows.at(row, i) - mean) / std::sqrt(variance + kEps) * weight[i];
      const double error = std::fabs(out.at(row, i) - (scaled + bias[i]));
      CHECK(error <= TypeOf<T>::rounding * (std::fabs(scaled) + std::fabs(bias[i])) + 10 * kSmallest,
            "%s: layer norm, feature %ld", kernels.instruction_set, static_cast<long>(i));
    }
  }
}

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu: return x / (1.0 + std::exp(-x));
    case Activation::kGeluTanh: return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kGelu: return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
    case Activation::kRelu2: return x > 0.0 ? x * x : 0.0;
  }
  return 0.0;
}

template <class T>
void check_activation(const Kernels& kernels, Activation activation, bool has_up, int64_t num_rows, int64_t num_features) {
  const Rows<T> gate_up(num_rows, has_up ? 2 * num_features : num_features, 3.0f);
  std::vector<T> first_result;
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    Rows<T> out(num_rows, num_features, 1.0f);
    const T between = out.numbers.size() > static_cast<size_t>(num_features) ? out.numbers[num_features] : T{};
    kernels.gated_activation({gate_up.numbers.data(), out.numbers.data(), TypeOf<T>::dtype, activation, num_rows, num_features,
                              gate_up.stride, out.stride, has_up},
                             pool);
    std::vector<T> results;
    for (int64_t row = 0; row < num_rows; ++row) {
      std::vector<double> expected;
      for (int64_t i = 0; i < num_features; ++i) {
        const double up = has_up ? gate_up.at(row, num_features + i) : 1.0;
        expected.push_back(activate(activation, gate_up.at(row, i)) * up);
        results.push_back(out.numbers[row * out.stride + i]);
      }
      check_row(kernels.instruction_set, out, row, expected);
    }
    if (num_rows > 1)
      CHECK(number_of(out.numbers[num_features]) == number_of(between), "%s: beyond a row", kernels.instruction_set);
    if (num_threads == 1) first_result = results;
    CHECK(same_bits(results, first_result), "%s: an activation depends on the threads", kernels.instruction_set);
  }
}

// Gates of heads lie among other numbers, one for each feature or one for all; with and without a norm before them.
template <class T>
void check_gate(const Kernels& kernels, int64_t num_heads, int64_t num_features, bool is_single, bool has_silu, bool has_norm) {
  constexpr int64_t kTokens = 5;
  constexpr float kEps = 1e-5f;
  const int64_t width = is_single ? 1 : num_features, head_stride = width + 2, token_stride = num_heads * head_stride + 1;
  const std::vector<T> before = random_numbers<T>(kTokens * num_heads * num_features, 2.0f);
  const std::vector<T> gates = random_numbers<T>((kTokens - 1) * token_stride + (num_heads - 1) * head_stride + width, 3.0f);
  const std::vector<float> weight = random_floats(num_features);
  std::vector<T> first_result;
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<T> rows = before;
    kernels.gate({rows.data(),
                  gates.data(),
                  TypeOf<T>::dtype,
                  has_silu,
                  kTokens,
                  num_heads,
                  num_features,
                  {token_stride, head_stride, is_single ? 0 : 1},
                  has_norm ? weight.data() : nullptr,
                  kEps},
                 pool);
    for (int64_t row = 0; row < kTokens * num_heads; ++row) {
      const T* first = &before[row * num_features];
      double squares = 0.0;
      for (int64_t i = 0; i < num_features; ++i) squares += number_of(first[i]) * number_of(first[i]);
      const double factor = 1.0 / std::sqrt(squares / num_features + kEps);
      for (int64_t i = 0; i < num_features; ++i) {
        const int64_t place = row / num_heads * token_stride + row % num_heads * head_stride + (is_single ? 0 : i);
        const double gate = number_of(gates[place]);
        double expected = number_of(first[i]) * (has_silu ? gate : 1.0) / (1.0 + std::exp(-gate));
        if (has_norm) expected *= factor * weight[i];
        const double error = std::fabs(number_of(rows[row * num_features + i]) - expected);
        CHECK(error <= TypeOf<T>::rounding * std::fabs(expected) + kSmallest, "%s: gate of row %ld, feature %ld",
              kernels.instruction_set, static_cast<long>(row), static_cast<long>(i));
      }
    }
    if (num_threads == 1) first_result = rows;
    CHECK(same_bits(rows, first_result), "%s: a gate depends on the threads", kernels.instruction_set);
  }
}

// A row with a NaN or an infinity has NaN in its norm, and no other row has.
template <class T>
void what_is_unsound_stays_in_its_row(const Kernels& kernels) {
  constexpr int64_t kRows = 3, kFeatures = 37;
  ThreadPool pool(1);
  for (const float unsound : {std::nanf(""), HUGE_VALF}) {
    Rows<T> rows(kRows, kFeatures, 1.0f);
    rows.numbers[rows.stride + 20] = from_float<T>(unsound);
    Rows<T> out = rows;
    const std::vector<float> weight(kFeatures, 1.0f);
    kernels.norm({rows.numbers.data(), nullptr, weight.data(), out.numbers.data(), TypeOf<T>::dtype, kRows, kFeatures,
                  rows.stride, 0, out.stride, 1.0f, 1e-6f},
                 pool);
    CHECK(std::isnan(out.at(1, 20)), "%s: %g became %g", kernels.instruction_set, unsound, out.at(1, 20));
    for (const int64_t row : {0, 2}) {
      for (int64_t i = 0; i < kFeatures; ++i)
        CHECK(std::isfinite(out.at(row, i)), "%s: row %ld", kernels.instruction_set, static_cast<long>(row));
    }
  }
}

template <class T>
void check_type(const Kernels& kernels) {
  for (const int64_t num_features : {1, 15, 16, 24, 64, 100, 900}) {
    for (const int64_t num_rows : {1, 5, 40}) {
      check_norm<T>(kernels, num_rows, num_features);
      check_layer_norm<T>(kernels, num_rows, num_features);
      for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu, Activation::kRelu2}) {
        for (const bool has_up : {true, false}) check_activation<T>(kernels, activation, has_up, num_rows, num_features);
      }
    }
  }
  for (const int64_t num_features : {1, 16, 31, 128}) {
    for (const int form : {0, 1, 2, 3, 4, 5, 6, 7}) {
      check_gate<T>(kernels, 3, num_features, (form & 1) != 0, (form & 2) != 0, (form & 4) != 0);
    }
  }
  what_is_unsound_stays_in_its_row<T>(kernels);
}

int main() {
  for (const Kernels* kernels : all_kernels()) {
    check_type<float>(*kernels);
    check_type<bf16>(*kernels);
    check_type<fp16>(*kernels);
  }
}
