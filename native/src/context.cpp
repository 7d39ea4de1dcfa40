#include "context.h"

#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace quire {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Context& Context::get() {
  static Context* context = new Context;  // outlives everything: threads may still run while the process ends
  return *context;
}

Context::Context() : kernels_(&best_kernels()), pool_(new ThreadPool(1)) {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                 [] {
                   get().forget_threads();
                   get().mutex.unlock();
                 });
#endif
}

// In the child of a fork() the threads do not exist, so that nobody could wait for their end: the old pool stays as it is.
void Context::forget_threads() {
  static_cast<void>(pool_.release());
  pool_ = std::make_unique<ThreadPool>(1);
}

void Context::set_threads(int num_threads) {
  const std::lock_guard<std::mutex> lock(mutex);
  pool_ = std::make_unique<ThreadPool>(num_threads);
}

bool Context::set_instruction_set(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Kernels* found = find_kernels(name);
  if (found == nullptr) return false;
  kernels_ = found;
  return true;
}

char* Context::scratch(int64_t bytes) {
  if (bytes > memory_bytes_) {
    memory_.reset();  // before there is more: nothing of it is kept
    memory_bytes_ = 0;
    const int64_t wanted = bytes + bytes / 2;  // a context that grows by a token does not come here in every step
    memory_.reset(static_cast<char*>(::operator new(wanted, kAlignment)));
    memory_bytes_ = wanted;
  }
  return memory_.get();
}

void Context::Delete::operator()(char* memory) const { ::operator delete(memory, kAlignment); }

}  // namespace quire
