//! What sinks count, in words: for docs/metrics.md and /metrics. Which of it a sink has depends on what it is.

macro_rules! lists {
    ($(Counter $counter:literal $meaning:literal;)+ $(Gauge $gauge:literal $what:literal;)+) => {
        /// Name and meaning of each counter.
        pub const SINK: &[(&str, &str)] = &[$(($counter, $meaning)),+];

        /// Likewise of what rises and falls.
        pub const SINK_GAUGES: &[(&str, &str)] = &[$(($gauge, $what)),+];
    };
}

lists! {
    Counter "files_written" "files written";
    Counter "files_written_bytes" "their bytes";
    Counter "files_failed" "profiles lost because their file could not be written";
    Counter "files_no_room" "profiles lost because too little space was free";
    Counter "files_evicted" "files taken away to stay within the limits of size, age and number";
    Counter "requests_made" "requests, or objects, put into the spool to be sent";
    Counter "requests_sent" "of those, taken by the receiver";
    Counter "sent_bytes" "their bytes, as they went over the network";
    Counter "requests_refused" "of those, refused for good: never sent again, and lost";
    Counter "requests_evicted" "of those, lost because the spool was full or the disk short of space: the oldest ones";
    Counter "requests_expired" "of those, lost because they were too old (spool.max_age)";
    Counter "requests_not_spooled" "requests lost because the spool could not take them, or not read them again";
    Counter "retries" "attempts that failed and are made again";
    Counter "profiles_rejected" "profiles that the receiver dropped from requests it took";
    Counter "samples_too_long" "stacks left out because one alone was longer than a request may be";
    Counter "labels_too_many" "labels left out because the server takes no more of a series";
    Gauge "requests_waiting" "requests that wait in the spool to be sent, now";
    Gauge "waiting_bytes" "bytes of the spool's files, now";
}

#[cfg(test)]
mod tests {
    use super::{SINK, SINK_GAUGES};
    use crate::config::Files;
    use crate::sink::Sink as _;
    use crate::sink::deliver::{Backlog, Figures};
    use crate::sink::directory::Directory;

    #[test]
    fn what_sinks_count_is_described() {
        let folder = tempfile::tempdir().unwrap();
        let files = Directory::open(folder.path(), &Files::default()).unwrap().counters();
        for (name, _) in files.into_iter().chain(Figures::default().counters(0)) {
            assert!(SINK.iter().any(|(known, _)| *known == name), "{name} is not described");
        }
        let gauges = Backlog::default().gauges().map(|(name, _)| name);
        assert_eq!(SINK_GAUGES.iter().map(|(name, _)| *name).collect::<Vec<_>>(), gauges);
    }
}
