//! What sinks count, in words: for docs/metrics.md and /metrics. Which of it a sink has depends on
//! what it is.

macro_rules! lists {
    ($(Counter $counter:literal $meaning:literal;)+ $(Gauge $gauge:literal $what:literal;)+) => {
        /// Name and meaning of each counter.
        pub const SINK: &[(&str, &str)] = &[$(($counter, $meaning)),+];

        /// Likewise of what rises and falls.
        pub const SINK_GAUGES: &[(&str, &str)] = &[$(($gauge, $what)),+];
    };
}

lists! {
    Counter "profiles_dropped" "profiles it was too busy for: it had not even put the window \
                                before into its spool, or there was no memory for another";
    Counter "profiles_lost_at_end" "profiles lost because the daemon ended: no time was left, or \
                                    the sink did not take them; the log names services and causes";
    Counter "files_written" "files written";
    Counter "files_written_bytes" "their bytes";
    Counter "files_failed" "profiles lost because their file could not be written";
    Counter "files_no_room" "profiles lost because too little space was free";
    Counter "files_evicted" "files taken away to stay within the limits of size, age and number";
    Counter "requests_made" "requests, or objects, made to be sent, and windows put into the \
                             spool as they are";
    Counter "requests_sent" "of those, taken by the receiver";
    Counter "sent_bytes" "their bytes, as they went over the network";
    Counter "requests_refused" "of those, refused for good: never sent again, and lost";
    Counter "requests_too_large" "of the refused ones, given up because they were longer than the \
                                  receiver takes and could not be split";
    Counter "requests_tries_over" "of the refused ones, given up after their number of tries, \
                                   while others were taken";
    Counter "requests_split" "requests that were split into smaller ones, and windows that waited \
                              in the spool and were made into requests: those count as made";
    Counter "requests_evicted" "of those, lost because the spool was full or the disk short of \
                                space: the oldest ones";
    Counter "requests_expired" "of those, lost because they were too old (spool.max_age)";
    Counter "requests_not_spooled" "of those, lost because the spool could not take them: too \
                                    long, no room, or it could not be used";
    Counter "requests_spool_lost" "of those, lost because their files in the spool were gone or \
                                   could not be read";
    Counter "retries" "attempts to send that failed and are made again";
    Counter "spool_reads_failed" "attempts to read from the spool that failed and are made again: \
                                  the disk's trouble, not the receiver's";
    Counter "profiles_rejected" "profiles that the receiver dropped from requests it took";
    Counter "profiles_too_large" "profiles given up because their names and locations took more \
                                  memory than there is for them";
    Counter "samples_too_long" "stacks left out because one alone was longer than a request may be";
    Counter "labels_too_many" "labels left out because the server takes no more of a series";
    Gauge "requests_waiting" "requests that wait in the spool to be sent, now, and windows that \
                              requests are still to be made of";
    Gauge "waiting_bytes" "bytes of the spool's files, now";
    Gauge "busy_seconds" "how long it has been at work on the present window: more than a \
                          window's length where it cannot keep up, or where a disk or mount does \
                          not answer";
}
