#include "dist/within.h"

#include <exception>
#include <future>
#include <memory>
#include <thread>

#include "core/threads.h"
#include "dist/flight_record.h"

namespace titan::checkpoint::detail {

bool within(std::chrono::milliseconds limit, std::function<void()> call) {
  const auto promise = std::make_shared<std::promise<void>>();
  std::future<void> done = promise->get_future();
  const auto run = [promise, call = std::move(call)]() mutable {
    const dist::BackgroundCalls background;
    std::exception_ptr error;
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
    call = nullptr;  // what it held (a group) goes before anybody hears that it is done
    error ? promise->set_exception(error) : promise->set_value();
  };
  {
    SignalsBlocked blocked;
    std::thread(run).detach();
  }
  if (done.wait_for(limit) != std::future_status::ready) return false;
  done.get();
  return true;
}

}  // namespace titan::checkpoint::detail
