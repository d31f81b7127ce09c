//! Where the threads of processes publish what they work for, written for the probes: on every
//! kernel, also where those walk no stacks and learn no rules.

use super::rules::gone;
use aya::maps::{HashMap as BpfHashMap, MapData};
use ebpf_common::key::SpanPlace;
use perfusion_host::process::RuleUpdate;

/// The map `SPANS`.
#[derive(Debug)]
pub struct SpanMap {
    places: BpfHashMap<MapData, u32, SpanPlace>,
    refused: u64,
}

impl SpanMap {
    pub(super) fn new(places: BpfHashMap<MapData, u32, SpanPlace>) -> Self {
        Self { places, refused: 0 }
    }

    /// Brings what updates say of it to the probes, in order. Answers the processes there was no
    /// room for.
    pub fn push_rules(&mut self, updates: &[RuleUpdate]) -> Vec<u32> {
        let mut refused = Vec::new();
        for update in updates {
            match *update {
                RuleUpdate::Spans { pid, place } if self.places.insert(pid, place, 0).is_err() => {
                    refused.push(pid)
                }
                RuleUpdate::NoSpans { pid } if !gone(self.places.remove(&pid)) => self.refused += 1,
                _ => {}
            }
        }
        self.refused += u64::try_from(refused.len()).unwrap_or(u64::MAX);
        refused
    }

    /// Updates the map did not take.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}
