#include "context.h"

namespace quire {

Context& Context::get() {
  static Context* context = new Context;  // outlives everything: threads may still run while the process ends
  return *context;
}

Context::Context() : kernels_(&best_kernels()), pool_(new ThreadPool(1)) {}

void Context::set_threads(int num_threads, std::vector<int> cpus) {
  const std::lock_guard<std::mutex> lock(mutex);
  pool_ = std::make_unique<ThreadPool>(num_threads, std::move(cpus));
}

bool Context::set_instruction_set(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Kernels* found = find_kernels(name);
  if (found == nullptr) return false;
  kernels_ = found;
  return true;
}

char* Context::scratch(int64_t bytes) {
  if (static_cast<int64_t>(memory_.size()) < bytes + 64) memory_.resize(bytes + 64);
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) & ~uintptr_t{63});
}

}  // namespace quire
