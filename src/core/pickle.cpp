// Protocol 2, with opcodes that PyTorch's memory viewer reads too.

#include "core/pickle.h"

#include <limits>
#include <utility>

namespace titan {

PickleWriter::PickleWriter() : bytes_("\x80\x02") {}

// Little-endian.
void PickleWriter::number(uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
}

void PickleWriter::integer(int64_t value) {
  const bool fits =
      value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max();
  opcode(fits ? 'J' : '\x8a');  // BININT; LONG1, whose length follows
  if (!fits) number(sizeof(value), 1);
  number(static_cast<uint64_t>(value), fits ? 4 : 8);
}

void PickleWriter::boolean(bool value) { opcode(value ? '\x88' : '\x89'); }

void PickleWriter::text(std::string_view value) {
  const auto known = texts_.find(value);
  if (known != texts_.end()) return again(known->second);
  opcode('X');  // BINUNICODE
  number(value.size(), 4);
  bytes_ += value;
  texts_.emplace(value, remember());
}

void PickleWriter::begin_list() { opcode(']'); }
void PickleWriter::append() { opcode('a'); }
void PickleWriter::begin_dict() { opcode('}'); }
void PickleWriter::set_item() { opcode('s'); }

uint32_t PickleWriter::remember() {
  opcode('r');  // LONG_BINPUT
  number(num_remembered_, 4);
  return num_remembered_++;
}

void PickleWriter::again(uint32_t remembered) {
  opcode('j');  // LONG_BINGET
  number(remembered, 4);
}

void PickleWriter::item(std::string_view key, int64_t value) {
  text(key);
  integer(value);
  set_item();
}

void PickleWriter::item(std::string_view key, std::string_view value) {
  text(key);
  text(value);
  set_item();
}

std::string PickleWriter::finish() {
  opcode('.');
  return std::move(bytes_);
}

}  // namespace titan
