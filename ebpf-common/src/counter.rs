//! THE list of the probes' and their reader's counters. Metric names and `docs/metrics.md` come
//! from here.
//!
//! Laws (each "dropped" cause is a counter of its own):
//! - `cpu_samples` = `cpu_samples_stored` + `cpu_samples_ring_full` + `cpu_samples_busy`
//! - `waits` = `waits_downsampled` + `waits_stored` + `waits_ring_full` + `waits_busy`
//! - `waker_stacks` = `waker_stacks_stored` + `waker_stacks_ring_full` + `waker_stacks_busy`
//! - `off_cpu_scanned` = `off_cpu_stored` + `off_cpu_ring_full` + `off_cpu_torn` +
//!   `off_cpu_deferred`
//! - `thread_ends` = `thread_ends_stored` + `thread_ends_ring_full`
//! - `renames` = `renames_stored` + `renames_ring_full` + `renames_skipped`
//! - all `_stored` together = `records_read` + records still in the ring

/// Identity and meaning of one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterInfo {
    /// Index into the per-CPU array. The reader's own counters have a place there too, which the
    /// probes leave at zero.
    pub id: u32,
    /// Metric name without prefix.
    pub name: &'static str,
    /// What one unit means.
    pub help: &'static str,
}

macro_rules! counters {
    ($($(#[$group:meta])* $variant:ident $name:literal $help:literal;)*) => {
        /// One counter of the list.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Counter {
            $(#[doc = $help] $variant,)*
        }

        impl Counter {
            /// All of them, in order of their ids.
            pub const ALL: &'static [CounterInfo] = &[
                $(CounterInfo { id: Counter::$variant as u32, name: $name, help: $help },)*
            ];

            /// Its index.
            #[must_use]
            pub const fn id(self) -> u32 {
                self as u32
            }
        }
    };
}

counters! {
    CpuSamples "cpu_samples" "timer ticks that found a selected thread running";
    CpuSamplesStored "cpu_samples_stored" "CPU samples put into the ring";
    CpuSamplesRingFull "cpu_samples_ring_full" "CPU samples dropped because the ring was full";
    CpuSamplesBusy "cpu_samples_busy" "CPU samples dropped because their buffer was in use";
    Waits "waits" "switch-outs of selected threads that stayed alive and known";
    WaitsDownsampled "waits_downsampled" "waits whose stack the sampler did not keep";
    WaitsStored "waits_stored" "waits whose stack was put into the ring";
    WaitsRingFull "waits_ring_full" "wait stacks dropped because the ring was full";
    WaitsBusy "waits_busy" "wait stacks dropped because their buffer was in use";
    WaitEndsStored "wait_ends_stored" "ends of kept waits put into the ring";
    WaitEndsRingFull "wait_ends_ring_full" "ends of kept waits dropped because the ring was full";
    ThreadEnds "thread_ends" "selected threads that switched out for the last time, or whose \
                              process became another program";
    ThreadEndsStored "thread_ends_stored" "thread ends put into the ring";
    ThreadEndsRingFull "thread_ends_ring_full" "thread ends dropped because the ring was full";
    ThreadEndsLost "thread_ends_lost" "of these, ends of first threads whose process became \
                                       another program at that moment: their times are lost";
    ThreadMapFull "thread_map_full" "scheduler events of threads for which the map had no room, \
                                     or only the room of an earlier one with the same id whose \
                                     times were still there";
    ThreadLate "thread_late" "threads first seen after the start that were not new: without room \
                              before, or newly in the cgroup; of first threads only those whose \
                              id was another's";
    SwitchesMissed "switches_missed" "switches the kernel did not report, made up for from the \
                                      thread's run time";
    WakingsMissed "wakings_missed" "waits whose end the kernel did not report before the thread \
                                    ran again: blocked to their end";
    SelectedMapFull "selected_map_full" "forked processes not selected because the map had no room";
    WalkFrames "walk_frames" "user frames the probes walked by rules they knew";
    WalksToStart "walks_to_start" "user stacks the probes walked to the thread's start";
    WalksHandedOver "walks_handed_over" "user stacks that left the probes as registers and a \
        copy, at the first frame without a rule";
    WalksTruncated "walks_truncated" "user stacks with more frames than a record holds";
    StackUnreadable "stack_unreadable" "stack copies without a single byte (page missing)";
    StackLimited "stack_limited" "stack copies that reached the limit, which is 16 KiB while the \
                                  ring is more than half full";
    User32Bit "user_32bit" "stacks of 32-bit code, which are not copied";
    KernelStackFailed "kernel_stack_failed" "kernel stacks the kernel could not walk";
    CpuBeyondMaps "cpu_beyond_maps" "events on a CPU beyond the ones possible at start";
    RecordsRead "records_read" "records taken out of the ring";
    RecordsBad "records_bad" "records in the ring that could not be decoded";
    PerfRecords "perf_records" "perf's records of mappings, names, forks and exits that were read";
    PerfLost "perf_lost" "perf's records for which its ring had no room";
    PerfBad "perf_bad" "perf's records that could not be decoded";
    ThreadTorn "thread_torn" "threads whose times kept changing while they were read";
    ThreadMisjudged "thread_misjudged" "threads that seemed to run and were found asleep in /proc";
    OffCpuScanned "off_cpu_scanned" "waits in progress that a scan of threads reached and whose \
        stack or weight was not known yet";
    OffCpuStored "off_cpu_stored" "scanned waits put into the ring";
    OffCpuRingFull "off_cpu_ring_full" "scanned waits dropped because the ring was full";
    OffCpuTorn "off_cpu_torn" "scanned waits that ended while their stack was copied";
    OffCpuDeferred "off_cpu_deferred" "scanned waits left to the next scan because the ring \
        was half full or the process was changing its mappings";
    WakesStored "wakes_stored" "wake-ups of kept waits by interrupts and the like, put into the \
                                ring with their kernel stack";
    WakesRingFull "wakes_ring_full" "wake-ups dropped because the ring was full: the waker is \
                                     known, what it was doing is not";
    WakerStacks "waker_stacks" "kept waits ended by a recorded thread whose stack was to be taken \
                                (--waker-stacks)";
    WakerStacksStored "waker_stacks_stored" "stacks of threads that ended kept waits, put into \
        the ring";
    WakerStacksRingFull "waker_stacks_ring_full" "stacks of threads that ended kept waits, \
        dropped because the ring was full";
    WakerStacksBusy "waker_stacks_busy" "stacks of threads that ended kept waits, dropped because \
        their buffer was in use";
    WakersOutside "wakers_outside" "kept waits that ended while a thread outside the recording \
                                    ran, whose doing it may have been: its stack is not taken \
                                    (--waker-stacks)";
    ScansRefused "scans_refused" "scans of sleeping threads that the kernel refused or that had \
                                    not ended when the next was due";
    StackOfFile "stack_of_file" "stacks of scanned waits in a mapping of a file, which are not \
                                 copied: reading it could take forever";
    ScansHeld "scans_held" "scans of sleeping threads given up because reading the stack of one \
                              took more than a second; its process is passed over from then on";
    StackPassedOver "stack_passed_over" "stacks of scanned waits of such processes, not copied";
    ThreadsLeft "threads_left" "threads found to have left the selection, or to have ended \
                                unseen: their times end with their last event";
    Spans "spans" "stacks sent with the span their thread worked for";
    SpansUnreadable "spans_unreadable" "threads whose published context could not be read";
    Renames "renames" "times that a recorded thread was given a name";
    RenamesStored "renames_stored" "renames put into the ring with the thread's times until then";
    RenamesRingFull "renames_ring_full" "renames dropped because the ring was full: the thread's \
        time is shared among its names by the samples";
    RenamesSkipped "renames_skipped" "renames not sent because the thread had very many in that \
                                      second: its time is shared among its names by the samples";
    CpuNotFollowed "cpu_not_followed" "CPUs that came online and could not be sampled (tried once \
                                       a second)";
}

/// Number of counters kept by the probes.
pub const COUNTERS: usize = Counter::ALL.len();

#[cfg(test)]
mod tests {
    use super::Counter;

    #[test]
    fn ids_are_positions_and_names_are_unique() {
        for (position, info) in Counter::ALL.iter().enumerate() {
            assert_eq!(info.id as usize, position);
            assert!(
                Counter::ALL.iter().filter(|other| other.name == info.name).count() == 1,
                "{}",
                info.name
            );
        }
    }
}
