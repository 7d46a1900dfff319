// Writes Standard MIDI Files.
#ifndef GNOMON_MODELS_MIDI_H_
#define GNOMON_MODELS_MIDI_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gnomon::lab {

// Steps of equal length, each a list of sounding pitches (0 to 127). A pitch that sounds in
// consecutive steps is a single note.
using PianoRoll = std::vector<std::vector<int64_t>>;

// Returns the bytes of a format-0 file. `tempo` is in quarter notes per minute, from 4 to 1000.
std::string MidiFile(const PianoRoll& roll, int64_t steps_per_quarter, double tempo);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_MIDI_H_
