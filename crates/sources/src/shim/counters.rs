//! What this stage counts, beside what each shim counts itself (`profiler_protocol::counter`).

macro_rules! totals {
    ($($(#[doc = $help:literal])+ $field:ident $name:literal;)+) => {
        /// Counters of this recorder's side, over all regions.
        #[derive(Clone, Copy, Debug, Default)]
        pub(super) struct ReaderTotals { $($(#[doc = $help])+ pub(super) $field: u64,)+ }

        /// Name and meaning of each.
        pub const SHIM_READER: &[(&str, &str)] = &[$(($name, concat!($($help),+)),)+];

        impl ReaderTotals {
            /// Name and value of each.
            pub(super) fn list(&self) -> Vec<(String, u64)> {
                vec![$(($name.to_owned(), self.$field),)+]
            }
        }
    };
}

totals! {
    /// Records read from shims' rings.
    records_read "shim_records_read";
    /// Records of kinds this version does not know.
    records_unknown "shim_records_unknown";
    /// Records whose content contradicts itself.
    records_malformed "shim_records_malformed";
    /// Records an earlier recorder had left behind.
    records_stale "shim_records_stale";
    /// Records of what the configuration leaves out, from before their shim heard of it or from one
    /// that knows nothing of it.
    records_left_out "shim_records_left_out";
    /// Records whose writer died while it wrote; neighbours that were unfinished too are counted
    /// with the first.
    holes "shim_holes";
    /// Rounds that left records for the next one because of the quota. Nothing is lost by it.
    quota_ends "shim_quota_ends";
    /// Regions read.
    regions_adopted "shim_regions_adopted";
    /// Things with a region's name that are none.
    regions_refused "shim_regions_refused";
    /// Regions given up because their process broke the protocol.
    regions_disabled "shim_regions_disabled";
    /// Regions not read because there are too many.
    regions_too_many "shim_regions_too_many";
    /// Instances of recorders that are gone, told to leave.
    regions_cleaned "shim_regions_cleaned";
    /// Times that lay in the future, set to the time of reading.
    times_corrected "shim_times_corrected";
    /// Records that name a thread their process does not have (or no longer had when its first
    /// record was read).
    threads_unknown "shim_threads_unknown";
    /// Waits for locks whose owner had a number that was no thread's for sure (.NET 11).
    owners_unknown "shim_lock_owners_unknown";
    /// Addresses not asked about because too many questions were open.
    names_dropped "shim_names_dropped";
    /// Questions given up after several tries.
    names_unanswered "shim_names_unanswered";
    /// Answers nobody had asked for.
    names_unasked "shim_names_unasked";
    /// Names of types beyond the limit of one region.
    types_refused "shim_types_refused";
    /// Processes not watched because there are too many.
    processes_too_many "shim_processes_too_many";
}
