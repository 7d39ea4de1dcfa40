#include "context.h"

#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace quire {
namespace {

// Of the large pages that most systems have.
constexpr int64_t kLargePage = int64_t{2} << 20;

// With small pages, the rows of a product are in more of them than a core has addresses at hand for.
void use_large_pages([[maybe_unused]] char* memory, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  static_cast<void>(madvise(memory, bytes, MADV_HUGEPAGE));  // a system that has none is only slower
#endif
}

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
    // A context that grows by a token does not come here in every step.
    const int64_t wanted = round_up(bytes + bytes / 2, kLargePage);
    memory_.reset(static_cast<char*>(::operator new(wanted, std::align_val_t{kLargePage})));
    memory_bytes_ = wanted;
    use_large_pages(memory_.get(), wanted);
  }
  return memory_.get();
}

void Context::Delete::operator()(char* memory) const { ::operator delete(memory, std::align_val_t{kLargePage}); }

}  // namespace quire
