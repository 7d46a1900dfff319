#include "models/midi.h"

#include <cmath>
#include <set>
#include <string_view>

namespace gnomon::lab {
namespace {

constexpr int64_t kTicksPerStep = 24;
constexpr int64_t kVelocity = 80;

class MidiBytes {
 public:
  // Appends a big-endian number.
  void Number(int64_t number, int bytes) {
    for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
      text_ += static_cast<char>((number >> shift) & 0xff);
    }
  }
  // Appends a number with seven bits per byte, most significant first. All bytes except the last
  // have the top bit set.
  void Variable(int64_t number) {
    std::string bytes(1, static_cast<char>(number & 0x7f));
    while ((number >>= 7) > 0) bytes.insert(0, 1, static_cast<char>((number & 0x7f) | 0x80));
    text_ += bytes;
  }
  void Text(std::string_view text) { text_ += text; }

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace

std::string MidiFile(const PianoRoll& roll, int64_t steps_per_quarter, double tempo) {
  MidiBytes track;
  track.Variable(0);
  track.Text("\xff\x51\x03");  // microseconds per quarter note
  track.Number(std::llround(60e6 / tempo), 3);
  int64_t passed = 0;  // ticks since the last event
  const auto send = [&](int64_t status, int64_t pitch, int64_t velocity) {
    track.Variable(passed);
    passed = 0;
    for (const int64_t byte : {status, pitch, velocity}) track.Number(byte, 1);
  };
  std::set<int64_t> sounding;
  const auto change = [&](const std::set<int64_t>& next) {
    for (const int64_t pitch : sounding) {
      if (!next.contains(pitch)) send(0x80, pitch, 0);
    }
    for (const int64_t pitch : next) {
      if (!sounding.contains(pitch)) send(0x90, pitch, kVelocity);
    }
    sounding = next;
  };
  for (const std::vector<int64_t>& step : roll) {
    change({step.begin(), step.end()});
    passed += kTicksPerStep;
  }
  change({});
  track.Variable(passed);
  track.Text(std::string_view("\xff\x2f\x00", 3));  // the end of the track
  MidiBytes file;
  file.Text("MThd");
  file.Number(6, 4);
  file.Number(0, 2);  // the format
  file.Number(1, 2);  // tracks
  file.Number(kTicksPerStep * steps_per_quarter, 2);
  file.Text("MTrk");
  file.Number(static_cast<int64_t>(track.text().size()), 4);
  file.Text(track.text());
  return file.text();
}

}  // namespace gnomon::lab
