// Mutations of a safetensors file. Most change the length of the JSON text, and its 8-byte length field would
// then make the parser refuse everything unread: that field is usually corrected afterwards.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const size_t brace = file.rfind('}');
  if (seed % 8 == 0 || brace == file.npos || brace < sizeof(uint64_t)) return size;
  const uint64_t length = brace + 1 - sizeof(uint64_t);
  std::memcpy(data, &length, sizeof length);
  return size;
}
