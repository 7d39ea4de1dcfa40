// What a process shares: threads that can be replaced, refused, and lost in a fork(); and scratch memory.
#include "context.h"

#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

using namespace quire;
using namespace quire::test;

int64_t sum_of_tasks(Context& context) {
  const std::lock_guard<std::mutex> lock(context.mutex);
  std::vector<int64_t> values(1000, 0);
  parallel_for(context.pool(), static_cast<int64_t>(values.size()), [&](int64_t task, int) { values[task] = task; });
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  return sum;
}

bool is_refused(Context& context, int num_threads) {
  try {
    context.set_threads(num_threads);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void a_wrong_number_of_threads_is_refused(Context& context) {
  context.set_threads(2);
  CHECK(is_refused(context, 0), "no threads");
  CHECK(is_refused(context, -1), "fewer than none");
  CHECK(context.pool().num_threads() == 2 && sum_of_tasks(context) == 499500, "the pool is no longer as it was");
}

void a_forked_child_works_with_threads_of_its_own(Context& context) {
  context.set_threads(3);
  CHECK(sum_of_tasks(context) == 499500, "before the fork");
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // ends a child that waits for threads that it does not have
    const bool is_right = context.pool().num_threads() == 1 && sum_of_tasks(context) == 499500;
    context.set_threads(1);
    _exit(is_right && sum_of_tasks(context) == 499500 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
  CHECK(context.pool().num_threads() == 3 && sum_of_tasks(context) == 499500, "after the fork");
}

void scratch_is_aligned_and_wholly_there(Context& context) {
  const std::lock_guard<std::mutex> lock(context.mutex);
  for (const int64_t bytes : {1, 63, 64, 1000, 999, 5000, 100000, 10}) {
    char* memory = context.scratch(bytes);
    CHECK(reinterpret_cast<uintptr_t>(memory) % 64 == 0, "%p", static_cast<void*>(memory));
    std::memset(memory, 1, bytes);
  }
}

int main() {
  Context& context = Context::get();
  a_wrong_number_of_threads_is_refused(context);
  a_forked_child_works_with_threads_of_its_own(context);
  scratch_is_aligned_and_wholly_there(context);
}
