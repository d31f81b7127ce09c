//! What sinks count, in words: for docs/metrics.md and /metrics. Which of it a sink has depends on what it is.

macro_rules! counters {
    ($($name:literal $help:literal;)+) => {
        /// Name and meaning of each.
        pub const SINK: &[(&str, &str)] = &[$(($name, $help)),+];
    };
}

counters! {
    "files_written" "files written";
    "files_written_bytes" "their bytes";
    "files_failed" "profiles lost because their file could not be written";
    "files_no_room" "profiles lost because too little space was free";
    "files_evicted" "files taken away to stay within the limits of size, age and number";
    "requests_made" "requests, or objects, put into the spool to be sent";
    "requests_sent" "of those, taken by the receiver";
    "sent_bytes" "their bytes, as they went over the network";
    "requests_refused" "of those, refused for good: never sent again, and lost";
    "requests_evicted" "of those, lost because the spool was full or the disk short of space: the oldest ones";
    "requests_expired" "of those, lost because they were too old (spool.max_age)";
    "requests_not_spooled" "requests lost because the spool could not take them, or not read them again";
    "retries" "attempts that failed and are made again";
    "profiles_rejected" "profiles that the receiver dropped from requests it took";
    "samples_too_long" "stacks left out because one alone was longer than a request may be";
    "labels_too_many" "labels left out because the server takes no more of a series";
}

#[cfg(test)]
mod tests {
    use super::SINK;
    use crate::config::Files;
    use crate::sink::Sink as _;
    use crate::sink::deliver::Figures;
    use crate::sink::directory::Directory;

    #[test]
    fn what_sinks_count_is_described() {
        let folder = tempfile::tempdir().unwrap();
        let files = Directory::open(folder.path(), &Files::default()).unwrap().counters();
        for (name, _) in files.into_iter().chain(Figures::default().counters(0)) {
            assert!(SINK.iter().any(|(known, _)| *known == name), "{name} is not described");
        }
    }
}
