// A small pool of threads for loops whose iterations are independent.
//
// Each thread owns a contiguous range of the tasks, so that the same thread sees the same weights in every step, and
// takes from the others' ranges when its own is done, so that a thread that has lost its core holds up nobody.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

class ThreadPool {
 public:
  using Body = void (*)(void* context, int64_t task, int thread);

  // `num_threads` counts the caller. Throws std::invalid_argument if it is below 1, std::system_error if the system has no
  // threads left. They are not pinned: work is taken over from a thread that has lost its core, which pinning would keep waiting
  // for it.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls body(context, task, thread) for every task in [0, num_tasks), 0 <= thread < num_threads(), and returns when
  // all are done. Not reentrant; one caller at a time.
  void run(int64_t num_tasks, Body body, void* context);

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> state{0};  // end in the high half, next task in the low half
  };

  void stop();
  void serve(int thread);
  void work(int thread);
  bool wait_for_job(uint64_t& seen);

  const int num_threads_;
  std::unique_ptr<Range[]> ranges_;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<uint64_t> epoch_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<int64_t> num_left_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable job_or_stop_;
};

// Calls function(task, thread) for every task, on all threads of `pool`.
template <class Function>
void parallel_for(ThreadPool& pool, int64_t num_tasks, const Function& function) {
  pool.run(
      num_tasks, [](void* context, int64_t task, int thread) { (*static_cast<const Function*>(context))(task, thread); },
      const_cast<Function*>(&function));
}

}  // namespace quire
