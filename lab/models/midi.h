// Standard MIDI Files.
#ifndef GNOMON_MODELS_MIDI_H_
#define GNOMON_MODELS_MIDI_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gnomon::lab {

// Steps of equal length, each with its sounding pitches (0 to 127). A pitch that sounds in
// consecutive steps is one note.
using PianoRoll = std::vector<std::vector<int64_t>>;

// The bytes of a format-0 file with `tempo` quarter notes per minute, 4 to 1000.
std::string MidiFile(const PianoRoll& roll, int64_t steps_per_quarter, double tempo);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_MIDI_H_
