// Calls that are recorded once and then run again and again, with nothing between them.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "context.h"

namespace quire {

// Pool and scratch memory are the call's as long as it runs.
template <class Call>
void compute(const Call& call) {
  Context& context = Context::get();
  const std::lock_guard<std::mutex> lock(context.mutex);
  call(context);
}

class Program {
 public:
  // Of this thread; null: calls are computed at once.
  static Program*& recording() {
    static thread_local Program* program = nullptr;
    return program;
  }

  void add(std::function<void(Context&)> call) { calls_.push_back(std::move(call)); }

  void run() const {
    for (const auto& call : calls_) compute(call);
  }

  bool is_empty() const { return calls_.empty(); }

 private:
  std::vector<std::function<void(Context&)>> calls_;
};

// Computes call(context), or records it: what it refers to must stay where it is then.
template <class Call>
void perform(Call call) {
  if (Program* program = Program::recording()) {
    program->add(std::move(call));
  } else {
    compute(call);
  }
}

}  // namespace quire
