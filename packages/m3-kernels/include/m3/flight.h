// Records of the flight recorder: m3_core.flight has the layout, says which thread writes what, and why no order between the stores is needed.
#pragma once
#include "m3/platform.h"

// What a launch writes when it waits or fails is off the way of every other launch.
#ifndef M3_DEVICE_OUTLINE
#define M3_DEVICE_OUTLINE M3_DEVICE_INLINE
#endif

namespace m3 {

// A ring of the host's, in memory that this rank's launches can write.
struct FlightRing {
  unsigned char* start;  // null: nothing is recorded
  int launches;          // that it keeps
};

// Where a record belongs.
struct FlightPlace {
  int epoch;
  int layer;
  protocol::Site site;
  int peer;  // or -1
};

M3_DEVICE_OUTLINE void write_flight(const FlightRing ring, long long clock, int event, const FlightPlace place, int detail) {
  if (ring.start == nullptr) return;
  const int site = static_cast<int>(place.site);
  Bits64* record = reinterpret_cast<Bits64*>(ring.start + protocol::flight_launch_record(ring.launches, place.epoch, event, site));
  const Bits64 when = static_cast<Bits64>(clock), where = protocol::flight_where(place.epoch, protocol::site_word(site, place.peer, place.layer));
  const Bits64 what = protocol::flight_what(event, platform::block_index(), detail);
  platform::store_system(record, when);
  platform::store_system(record + 1, where);
  platform::store_system(record + 2, what);
  platform::store_system(record + 3, protocol::flight_check(when, where, what));
}

// Whether this thread writes the launch's records.
M3_DEVICE_INLINE bool writes_flight(const FlightRing& ring) {
  return ring.start != nullptr && platform::thread_index() == 0 && platform::block_index() == 0;
}

}  // namespace m3
