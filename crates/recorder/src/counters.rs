//! What the stages inside the daemon count, in words: for docs/metrics.md and for whoever reads a
//! profile's comments.

macro_rules! counters {
    ($($name:literal $help:literal;)+) => {
        /// Name and meaning of each.
        pub const DAEMON: &[(&str, &str)] = &[$(($name, $help)),+];
    };
}

counters! {
    "order_late" "events that came after later ones had been passed on; they are passed on all \
        the same";
    "collector_paused_rounds" "rounds without a look into the rings because too much was on its \
        way to the processor";
    "calls_given_up" "readings of a process's memory or files given up because its file system \
        did not answer in time";
    "calls_not_made" "readings not tried because the same process or file system had just held up \
        another one";
    "events_cpu_samples" "CPU samples stored in the profile";
    "events_waits" "waits stored with their stack";
    "events_allocations" "allocation samples stored";
    "events_allocations_after_end" "allocation samples that came while the last names were waited \
        for; not in the profile";
    "stacks_walked" "user stacks";
    "stacks_exact" "user stacks that reach the thread's start without a guess";
    "stacks_guessed" "user stacks that reach the thread's start with frames that were guessed";
    "stacks_broken" "user stacks that do not reach the thread's start; a frame in square brackets \
        says why";
    "stacks_exiting" "user stacks of threads that the kernel was ending, whose memory was gone; \
        none of them is broken";
    "stacks_stale" "of the broken ones, walked by rules of a program image the process has left";
    "stacks_of_gone_processes" "of the broken ones, of processes that were gone before their \
        mappings could be read";
    "stacks_refused" "stacks beyond the limit on distinct ones; they are `[other stacks]`";
    "spans_refused" "stacks whose span was beyond the limit on distinct ones of a process or of \
        all; its ids are `[other]`";
    "guessed_frames" "frames found by a frame pointer or a scan, for want of unwind data";
    "stack_pieces_read" "pieces of sleeping threads' stacks that were read where the copy had \
        ended";
    "processes_read_anew" "times all processes were read again, each before its next stack, \
        because records about them had been lost";
    "processes_refused" "times a process was not taken up because there are too many: at its \
        start, and at each of its stacks";
    "mappings_refused" "mappings not known because a process has too many";
    "mappings_evicted" "times the mappings of the process sampled longest ago were forgotten to \
        make room; they are read again before its next stack";
    "maps_read_again" "times a process's mappings were read again";
    "images_failed" "files that could not be read as programs or libraries";
    "descriptors_short" "times a mapped file was not opened because this process may have no more \
        open files (RLIMIT_NOFILE)";
    "images_refused" "files not opened because there are too many";
    "images_evicted" "mapped files forgotten to make room for others; no stack has a frame in them";
    "image_evictions" "times unwind data of a file was dropped to stay within memory";
    "rules_cleared" "times a quarter of a process's unwind rules or methods was forgotten because \
        there were too many";
    "rules_evicted" "times all unwind rules of the process sampled longest ago were forgotten to \
        make room";
    "method_bodies_replaced" "managed methods whose code was found to be another's";
    "unwind_budget_refusals" "looks into code put off because their process had used up its share \
        of the time";
    "rules_pushed" "unwind rules sent to the probes";
    "rules_refused" "unwind rules not sent because their process had used up its share";
    "rules_lost" "unwind rules the kernel did not take";
    "wait_ends_unmatched" "ends of waits whose beginning is not known";
    "threads_summed_up" "threads that ended and of which only the sum is kept";
    "wakers_capped" "wakers beyond the limit of a thread's distinct waits; they are `[other]`";
    "allocations_untracked" "allocation samples whose object was not watched";
    "allocation_sites_refused" "allocations beyond the limit on distinct sites of a process; they \
        are one site";
    "live_objects_refused" "live objects beyond the limit of a process";
    "events_exceptions" "exceptions stored with their stack";
    "events_contentions" "waits for locks stored with their stack";
    "runtime_events_after_end" "exceptions and waits for locks that came while the last names \
        were waited for; not in the profile";
    "runtime_event_places_refused" "exceptions and waits for locks beyond the limit on distinct \
        places of a process; they are one place";
    "gc_events_unmatched" "collections and pauses of which only the beginning or only the end was \
        told";
    "thread_pool_starvations" "times a thread pool added a worker because work had waited for \
        half a second and no worker had taken any (--thread-pool)";
    "window_overflowed" "samples beyond the limit on distinct ones; they are one row";
    "window_labels_capped" "labels beyond the limit on distinct values; they are `[other]`";
    "window_values_refused" "values that would overflow their sum";
    "symbolize_kernel_unknown" "kernel addresses without a name";
    "symbolize_image_not_open" "frames of files that could not be opened";
    "symbolize_image_unreadable" "frames of files whose symbols could not be read";
    "symbolize_no_symbol" "frames that no symbol of their file covers";
    "symbolize_managed_not_answered" "managed methods whose name nobody told: no shim, or it did \
        not answer in time";
    "symbolize_managed_no_method" "managed addresses of which the runtime says that there is no \
        method";
    "symbolize_managed_unloaded" "managed methods unloaded before their name was told";
    "symbolize_managed_conflict" "managed addresses that two methods claim";
    "symbolize_managed_store_full" "managed methods beyond the limit on names";
    "symbolize_no_mapping" "addresses in no known mapping";
    "symbolize_not_looked_up" "frames whose name was needed before it was looked up";
    "debug_files" "separate debug files that native symbols were read from";
    "debug_files_refused" "debug files that were not used: of another build than the mapped file, \
        or not its owner's";
    "packed_symbol_tables" "native files whose packed symbols (`.gnu_debugdata`) were read";
    "native_lines" "addresses in native code whose source lines are known";
    "native_lines_refused" "native files, units of them, and addresses in them without lines, \
        because their debug information is wrong or beyond a limit";
    "perf_maps_read" "perf maps read";
    "perf_maps_refused" "perf maps that are somebody else's, or too large";
    "perf_map_bad_lines" "lines of perf maps that make no sense";
    "perf_maps_cut" "perf maps of which only the beginning was read";
    "names_read" "names of managed methods that were read from their process's memory, for want of \
        a shim";
    "names_not_described" "names not read because the runtime does not say where its data is";
    "names_without_method" "names not read because nothing says which method has that code";
    "names_inconsistent" "names not read because what was found does not fit together";
    "names_without_metadata" "names not read because the method's module has no metadata that can \
        be read";
    "names_of_replaced_code" "names not read because other code had taken the place";
    "names_held_up" "names not read because the process was gone, has no runtime, or held the \
        reading up";
    "names_lost" "names not asked for because too many were on their way; they are when they are \
        met again";
    "managed_frames" "distinct managed frames of each window, summed up, of processes whose shim \
        is asked for names";
    "managed_frames_unnamed" "of those, frames that had no name when their window was encoded: \
        nobody told it in time, or the code was gone";
    "managed_names_refused" "names beyond the limit of a process";
    "managed_ranges_claimed_twice" "code ranges for which two names came";
    "pdbs_read" "PDBs read for the lines of managed code";
    "modules_without_pdb" "assemblies whose PDB was not found where lines were asked for";
    "methods_with_lines" "bodies of managed methods whose lines are known";
    "method_lines_refused" "bodies of managed methods whose lines are beyond the limit on memory";
}

#[cfg(test)]
mod tests {
    use super::DAEMON;
    use crate::counter_values::{add, daemon_counters, window_counters};
    use crate::processor::Processor;
    use perfusion_aggregate::window::{Window, WindowLimits};
    use perfusion_host::process::ProcessTable;

    #[test]
    fn every_counter_of_the_stages_is_described() {
        let counted = daemon_counters(&Processor::new(ProcessTable::new()));
        for (name, _) in counted {
            assert!(DAEMON.iter().any(|(known, _)| *known == name), "{name} is not described");
        }
    }

    /// But for those of the collector, of the probes' rules, of the reader of names, and of names,
    /// of which there are only those that count something.
    #[test]
    fn every_counter_that_is_described_is_counted() {
        let mut counted = daemon_counters(&Processor::new(ProcessTable::new()));
        counted.extend(window_counters(&Window::new(WindowLimits::default())));
        let others = ["order_late", "collector_paused_rounds", "rules_lost"];
        for (name, _) in DAEMON
            .iter()
            .filter(|(name, _)| !["symbolize_", "names_"].iter().any(|of| name.starts_with(of)))
            .filter(|(name, _)| !others.contains(name))
        {
            assert!(counted.iter().any(|(known, _)| known == name), "{name} is nobody's");
        }
    }

    #[test]
    fn counters_of_windows_are_summed_up() {
        let of = |list: &[(&str, u64)]| {
            list.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<Vec<_>>()
        };
        let mut sums = Vec::new();
        add(&mut sums, &of(&[("a", 1), ("b", 2)]));
        add(&mut sums, &of(&[("b", 3), ("c", 0)]));
        assert_eq!(sums, of(&[("a", 1), ("b", 5), ("c", 0)]));
    }
}
