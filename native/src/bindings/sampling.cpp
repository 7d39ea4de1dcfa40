#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

LogitRows logit_rows(uintptr_t logits, int64_t row_stride, uintptr_t rows, int64_t num_rows, int64_t vocab_size) {
  return {at_address<const float>(logits), row_stride, at_address<const int64_t>(rows), num_rows, vocab_size};
}

void largest(uintptr_t logits, int64_t row_stride, uintptr_t rows, int64_t num_rows, int64_t vocab_size, uintptr_t token_ids,
             uintptr_t maxima) {
  Context& context = Context::get();
  const std::lock_guard<std::mutex> lock(context.mutex);
  LargestCall call{logit_rows(logits, row_stride, rows, num_rows, vocab_size), at_address<int64_t>(token_ids),
                   at_address<float>(maxima), nullptr};
  call.scratch = context.scratch(call.scratch_bytes());
  context.kernels().largest(call, context.pool());
}

void likeliest(uintptr_t logits, int64_t row_stride, uintptr_t rows, int64_t num_rows, int64_t vocab_size, uintptr_t head_logits,
               uintptr_t token_ids, uintptr_t counts, uintptr_t is_complete) {
  Context& context = Context::get();
  const std::lock_guard<std::mutex> lock(context.mutex);
  LikeliestCall call{logit_rows(logits, row_stride, rows, num_rows, vocab_size),
                     at_address<float>(head_logits),
                     at_address<int64_t>(token_ids),
                     at_address<int64_t>(counts),
                     at_address<uint8_t>(is_complete),
                     nullptr};
  call.scratch = context.scratch(call.scratch_bytes(context.pool().num_threads()));
  context.kernels().likeliest(call, context.pool());
}

void sum_exp(uintptr_t logits, int64_t row_stride, uintptr_t rows, int64_t num_rows, int64_t vocab_size, uintptr_t maxima,
             uintptr_t temperatures, uintptr_t sums) {
  Context& context = Context::get();
  const std::lock_guard<std::mutex> lock(context.mutex);
  SumExpCall call{logit_rows(logits, row_stride, rows, num_rows, vocab_size), at_address<const float>(maxima),
                  at_address<const double>(temperatures), at_address<double>(sums), nullptr};
  call.scratch = context.scratch(call.scratch_bytes());
  context.kernels().sum_exp(call, context.pool());
}

void ranks(uintptr_t logits, int64_t row_stride, uintptr_t rows, int64_t num_rows, int64_t vocab_size, uintptr_t token_ids,
           uintptr_t ranks) {
  Context& context = Context::get();
  const std::lock_guard<std::mutex> lock(context.mutex);
  RanksCall call{logit_rows(logits, row_stride, rows, num_rows, vocab_size), at_address<const int64_t>(token_ids),
                 at_address<int64_t>(ranks), nullptr};
  call.scratch = context.scratch(call.scratch_bytes());
  context.kernels().ranks(call, context.pool());
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.attr("MIN_HEAD_TOKENS") = kMinHeadTokens;
  module.attr("MAX_HEAD_TOKENS") = kMaxHeadTokens;
  module.def("largest", &largest, "logits"_a, "row_stride"_a, "rows"_a, "num_rows"_a, "vocab_size"_a, "token_ids"_a, "maxima"_a,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("likeliest", &likeliest, "logits"_a, "row_stride"_a, "rows"_a, "num_rows"_a, "vocab_size"_a, "head_logits"_a,
             "token_ids"_a, "counts"_a, "is_complete"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("sum_exp", &sum_exp, "logits"_a, "row_stride"_a, "rows"_a, "num_rows"_a, "vocab_size"_a, "maxima"_a,
             "temperatures"_a, "sums"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("ranks", &ranks, "logits"_a, "row_stride"_a, "rows"_a, "num_rows"_a, "vocab_size"_a, "token_ids"_a, "ranks"_a,
             nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
