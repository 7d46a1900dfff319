#include "training/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "training/files.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors are stored little-endian");

// The maximum that the reference implementation accepts.
constexpr uint64_t kLongestHeader = 100'000'000;

struct NamedType {
  const char* name;
  torch::ScalarType type;
  // The type to which tensors are converted when read. Wide unsigned integers become signed,
  // because PyTorch has few operators for them.
  torch::ScalarType read_as = type;
};

constexpr std::array<NamedType, 13> kTypes = {{{"F64", torch::kDouble},
                                               {"F32", torch::kFloat},
                                               {"F16", torch::kHalf},
                                               {"BF16", torch::kBFloat16},
                                               {"I64", torch::kLong},
                                               {"I32", torch::kInt},
                                               {"I16", torch::kShort},
                                               {"I8", torch::kChar},
                                               {"U64", torch::kUInt64, torch::kLong},
                                               {"U32", torch::kUInt32, torch::kLong},
                                               {"U16", torch::kUInt16, torch::kInt},
                                               {"U8", torch::kByte},
                                               {"BOOL", torch::kBool}}};

const char* TypeName(torch::ScalarType type) {
  for (const NamedType& known : kTypes) {
    if (known.type == type) return known.name;
  }
  throw Error(StrCat("safetensors: cannot store tensors of type ", c10::toString(type)));
}

std::string_view Bytes(const torch::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Reads a file; errors name the file.
class Reader {
 public:
  // Reads the header and, if requested, the tensors.
  explicit Reader(const std::filesystem::path& path, bool has_tensors = true)
      : path_(path.string()) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) {
      Fail("it is a folder (`gnomon data` converts other formats)");
    }
    if (IsDevice(path)) Fail("it is a device, not a file");
    std::ifstream in(path, std::ios::binary);
    if (!in) throw Error(StrCat("cannot read ", path_));
    if (has_tensors) {
      bytes_.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    } else {
      uint64_t length = 0;
      if (in.read(reinterpret_cast<char*>(&length), 8) && length <= kLongestHeader) {
        bytes_.resize(8 + length);
        std::memcpy(bytes_.data(), &length, 8);
        in.read(bytes_.data() + 8, static_cast<std::streamsize>(length));
        bytes_.resize(8 + static_cast<size_t>(in.gcount()));
      }
    }
    if (in.bad()) throw Error(StrCat("cannot read ", path_));
  }

  std::map<std::string, std::string> ReadMetadata() {
    const json header = Header();
    return header.contains("__metadata__") ? Metadata(header["__metadata__"])
                                           : std::map<std::string, std::string>();
  }

  SafeTensors Read() {
    const json header = Header();
    SafeTensors content;
    std::vector<Entry> entries;
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        content.metadata = Metadata(entry);
      } else {
        entries.push_back(ReadEntry(name, entry));
      }
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    uint64_t end = 0;
    for (const Entry& entry : entries) {
      if (entry.begin < end) Fail("two tensors overlap");
      if (entry.begin > end) {
        Fail(StrCat("bytes ", end, " to ", entry.begin, " do not belong to any tensor"));
      }
      end = entry.end;
    }
    if (end != DataSize()) {
      Fail(StrCat("the tensors occupy ", end, " bytes, but the file contains ", DataSize(),
                  " bytes of data"));
    }
    // Tensors are allocated only now, so that a malformed header cannot claim the same bytes for
    // many tensors.
    for (const Entry& entry : entries) content.tensors[entry.name] = Tensor(entry);
    return content;
  }

 private:
  // A tensor's entry in the header. Offsets are relative to the data.
  struct Entry {
    std::string name;
    const NamedType* type;
    std::vector<int64_t> sizes;
    uint64_t begin;
    uint64_t end;
  };

  [[noreturn]] void Fail(const std::string& fault) const {
    throw Error(StrCat(path_, " is not a valid safetensors file: ", fault));
  }

  uint64_t DataSize() const { return bytes_.size() - data_; }

  json Header() {
    if (bytes_.empty()) Fail("it is empty");
    if (bytes_.size() < 8) {
      Fail(StrCat("it has ", bytes_.size(), " bytes; expected at least 8"));
    }
    uint64_t length = 0;
    std::memcpy(&length, bytes_.data(), 8);
    if (length > kLongestHeader) Fail("it has no header (`gnomon data` converts other formats)");
    if (length > bytes_.size() - 8) {
      Fail(StrCat("it is truncated: its header has ", length, " bytes, but only ",
                  bytes_.size() - 8, " are present"));
    }
    data_ = 8 + length;
    std::set<std::string> names;
    std::string twice;
    const auto note_names = [&](int depth, json::parse_event_t event, json& value) {
      if (depth == 1 && event == json::parse_event_t::key) {
        const auto& name = value.get_ref<const std::string&>();
        if (!names.insert(name).second) twice = name;
      }
      return true;
    };
    json header = json::parse(bytes_.begin() + 8, bytes_.begin() + static_cast<int64_t>(data_),
                              note_names, /*allow_exceptions=*/false);
    if (!header.is_object()) Fail("its header is not a JSON object");
    if (!twice.empty()) Fail(StrCat("the tensor '", twice, "' appears twice"));
    return header;
  }

  std::map<std::string, std::string> Metadata(const json& entry) const {
    std::map<std::string, std::string> metadata;
    if (!entry.is_object()) Fail("its __metadata__ is not an object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) Fail(StrCat("the metadata value of '", key, "' is not a string"));
      metadata[key] = value.get<std::string>();
    }
    return metadata;
  }

  [[noreturn]] void FailAt(const std::string& name, const std::string& fault) const {
    Fail(StrCat("the tensor '", name, "' ", fault));
  }

  Entry ReadEntry(const std::string& name, const json& entry) const {
    const auto fail = [&](const std::string& fault) { FailAt(name, fault); };
    if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
        !entry.contains("data_offsets")) {
      fail("lacks dtype, shape or data_offsets");
    }
    const json& dtype = entry["dtype"];
    const auto type = std::find_if(kTypes.begin(), kTypes.end(), [&](const NamedType& known) {
      return dtype.is_string() && dtype.get_ref<const std::string&>() == known.name;
    });
    if (type == kTypes.end()) {
      std::vector<std::string> names;
      for (const NamedType& known : kTypes) names.emplace_back(known.name);
      fail(StrCat("has the unknown dtype ", Quote(dtype), "; expected one of ", Join(names, ", ")));
    }
    const json& shape = entry["shape"];
    const json& offsets = entry["data_offsets"];
    if (!IsNaturals(shape)) fail("has a shape that is not a list of non-negative integers");
    if (!IsNaturals(offsets) || offsets.size() != 2) {
      fail("has data_offsets that are not two non-negative integers");
    }
    const auto begin = offsets[0].get<uint64_t>();
    const auto end = offsets[1].get<uint64_t>();
    if (begin > end)
      fail(StrCat("has data_offsets from ", begin, " to ", end,
                  "; expected non-decreasing offsets"));
    if (end > DataSize()) {
      Fail(StrCat("it is truncated: the tensor '", name, "' occupies bytes ", begin, " to ", end,
                  ", but the file contains ", DataSize(), " bytes of data"));
    }
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    std::vector<int64_t> sizes;
    uint64_t extent = c10::elementSize(type->type);  // in bytes, ignoring axes of size 0
    bool empty = false;
    for (const json& size : shape) {
      const auto n = size.get<uint64_t>();
      if (n > 0 && extent > kMost / n)
        fail("has a shape that is too large; expected at most 2^63 - 1 bytes");
      extent *= std::max<uint64_t>(n, 1);
      empty = empty || n == 0;
      sizes.push_back(static_cast<int64_t>(n));
    }
    const uint64_t bytes = empty ? 0 : extent;
    if (bytes != end - begin) {
      fail(
          StrCat("has ", end - begin, " bytes, but its shape ", shape.dump(), " requires ", bytes));
    }
    return {name, &*type, std::move(sizes), begin, end};
  }

  torch::Tensor Tensor(const Entry& entry) const {
    torch::Tensor tensor = torch::empty(entry.sizes, entry.type->type);
    if (entry.end > entry.begin) {
      std::memcpy(tensor.mutable_data_ptr(), bytes_.data() + data_ + entry.begin,
                  entry.end - entry.begin);
    }
    if (entry.type->read_as == entry.type->type) return tensor;
    tensor = tensor.to(entry.type->read_as);
    if (tensor.numel() > 0 && tensor.min().item<int64_t>() < 0) {
      FailAt(entry.name, "contains values above 2^63 - 1");
    }
    return tensor;
  }

  static bool IsNaturals(const json& list) {
    return list.is_array() && std::all_of(list.begin(), list.end(), [](const json& number) {
             return number.is_number_unsigned();
           });
  }

  static std::string Quote(const json& value) {
    return value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 40);
  }

  std::string path_;
  std::string bytes_;
  uint64_t data_ = 0;
};

}  // namespace

void WriteSafeTensors(const std::filesystem::path& path, const SafeTensors& content) {
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const auto& [name, tensor] : content.tensors) {
    tensors.emplace_back(name, tensor.detach().cpu().contiguous());
  }
  // Storing tensors with wide types first keeps every tensor aligned.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!content.metadata.empty()) header["__metadata__"] = content.metadata;
  uint64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", TypeName(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {at, at + tensor.nbytes()}}};
    at += tensor.nbytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::vector<std::string_view> parts = {{reinterpret_cast<const char*>(&length), 8}, text};
  for (const auto& [name, tensor] : tensors) parts.push_back(Bytes(tensor));
  WriteFileAtomically(path, parts);
}

SafeTensors ReadSafeTensors(const std::filesystem::path& path) { return Reader(path).Read(); }

std::map<std::string, std::string> ReadSafeTensorsMetadata(const std::filesystem::path& path) {
  return Reader(path, /*has_tensors=*/false).ReadMetadata();
}

}  // namespace gnomon::lab
