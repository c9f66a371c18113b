#include "parallel/interned.h"

#include <mutex>
#include <set>

namespace titan {

const char* interned(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> texts;
  const std::lock_guard lock(mutex);
  return texts.insert(text).first->c_str();
}

}  // namespace titan
