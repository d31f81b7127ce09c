//! One profile -> the same with fewer labels on its samples, for receivers that make a series of each set of them.

use super::proto::{Label, Profile, Sample};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// The profile with those texts among its samples' labels that `kept` has a name for, under that name and as `cut` leaves them, and without all others.
/// Samples that are then the same, of one stack and with the same labels, become one with the sum of their values. No two names of `kept` are the same.
#[must_use]
pub fn narrow(whole: &Profile, kept: &BTreeMap<&str, String>, cut: impl Fn(&str) -> &str) -> Profile {
    let text = |place: i64| {
        let found = usize::try_from(place).ok().and_then(|place| whole.string_table.get(place));
        found.map_or("", String::as_str)
    };
    let mut string_table = whole.string_table.clone();
    let mut place_of = |old: i64, new: &str| {
        if new == text(old) {
            return old;
        }
        // Few are another text than before.
        let known = string_table.iter().position(|known| known == new);
        let place = known.unwrap_or_else(|| {
            string_table.push(new.to_owned());
            string_table.len() - 1
        });
        i64::try_from(place).unwrap_or(0)
    };
    // Places of the new texts by those of the old ones.
    let (mut names, mut values) = (HashMap::new(), HashMap::new());
    let mut known: HashMap<(&[u64], Vec<Label>), usize> = HashMap::new();
    let mut merged: Vec<Sample> = Vec::new();
    for sample in &whole.sample {
        let mut labels = Vec::new();
        for label in sample.label.iter().filter(|label| label.str != 0) {
            let name = names
                .entry(label.key)
                .or_insert_with(|| kept.get(text(label.key)).map(|name| place_of(label.key, name)));
            let Some(key) = *name else { continue };
            let value = values.entry(label.str).or_insert_with(|| place_of(label.str, cut(text(label.str))));
            labels.push(Label { key, str: *value, ..Label::default() });
        }
        labels.sort_unstable_by_key(|label| label.key);
        match known.entry((sample.location_id.as_slice(), labels)) {
            Entry::Occupied(same) => {
                let sums = merged.get_mut(*same.get()).into_iter().flat_map(|same| &mut same.value);
                sums.zip(&sample.value).for_each(|(sum, value)| *sum = sum.saturating_add(*value));
            }
            Entry::Vacant(new) => {
                let label = new.key().1.clone();
                new.insert(merged.len());
                merged.push(Sample {
                    location_id: sample.location_id.clone(),
                    value: sample.value.clone(),
                    label,
                });
            }
        }
    }
    // Field by field, since the samples that are not kept are most of it.
    Profile {
        sample_type: whole.sample_type.clone(),
        sample: merged,
        mapping: whole.mapping.clone(),
        location: whole.location.clone(),
        function: whole.function.clone(),
        string_table,
        drop_frames: whole.drop_frames,
        keep_frames: whole.keep_frames,
        time_nanos: whole.time_nanos,
        duration_nanos: whole.duration_nanos,
        period_type: whole.period_type,
        period: whole.period,
        comment: whole.comment.clone(),
        default_sample_type: whole.default_sample_type,
        doc_url: whole.doc_url,
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{Label, Location, Profile, Sample, ValueType};
    use super::super::validate;
    use super::narrow;
    use std::collections::BTreeMap;

    /// Location, nanoseconds and labels of a sample.
    type Told<'a> = (u64, i64, &'a [(&'a str, &'a str)]);

    /// One with these samples, each of which has a number of its own, too.
    fn profile(samples: &[Told<'_>]) -> Profile {
        let mut string_table: Vec<String> = ["", "cpu", "nanoseconds", "pid"].map(str::to_owned).to_vec();
        let mut place = |text: &str| {
            let found = string_table.iter().position(|known| known == text);
            i64::try_from(found.unwrap_or_else(|| {
                string_table.push(text.to_owned());
                string_table.len() - 1
            }))
            .unwrap()
        };
        let mut whole = Profile {
            sample_type: vec![ValueType { r#type: 1, unit: 2 }],
            period_type: Some(ValueType { r#type: 1, unit: 2 }),
            default_sample_type: 1,
            comment: vec![2],
            ..Profile::default()
        };
        for (number, (location, value, labels)) in (1..).zip(samples) {
            let texts = labels.iter().map(|(name, value)| Label {
                key: place(name),
                str: place(value),
                ..Label::default()
            });
            let mut label: Vec<Label> = texts.collect();
            label.push(Label { key: 3, num: number, ..Label::default() });
            whole.sample.push(Sample { location_id: vec![*location], value: vec![*value], label });
        }
        whole.location = (1..=3).map(|id| Location { id, address: id, ..Location::default() }).collect();
        whole.string_table = string_table;
        whole
    }

    /// Locations, values and labels of its samples, in order.
    fn told(profile: &Profile) -> Vec<(u64, i64, String)> {
        let text = |place: i64| profile.string_table[usize::try_from(place).unwrap()].as_str();
        let of = |sample: &Sample| {
            let labels = sample.label.iter().map(|label| format!("{}={}", text(label.key), text(label.str)));
            (sample.location_id[0], sample.value[0], labels.collect::<Vec<_>>().join(" "))
        };
        profile.sample.iter().map(of).collect()
    }

    #[test]
    fn what_differs_in_nothing_that_is_kept_is_one_sample_with_the_sum() {
        let whole = profile(&[
            (1, 1, &[("thread_name", "a"), ("k8s.pod.name", "web"), ("x", "longest")]),
            (2, 2, &[("thread_name", "a")]),
            (1, 4, &[("x", "longer"), ("k8s.pod.name", "web"), ("thread_name", "b")]),
            (2, 8, &[("thread_name", "b"), ("k8s.pod.name", "web")]),
            (2, 16, &[]),
            (1, 32, &[("k8s.pod.name", "api"), ("x", "lone")]),
        ]);
        validate(&whole).unwrap();
        let kept = BTreeMap::from([("k8s.pod.name", "k8s_pod_name".to_owned()), ("x", "x".to_owned())]);
        let narrowed = narrow(&whole, &kept, |text| &text[..text.len().min(4)]);
        validate(&narrowed).unwrap();
        let pod = |text: &str| text.replace("pod", "k8s_pod_name");
        let expected = [
            (1, 1 + 4, pod("x=long pod=web")),
            (2, 2 + 16, String::new()),
            (2, 8, pod("pod=web")),
            (1, 32, pod("x=lone pod=api")),
        ];
        assert_eq!(told(&narrowed), expected);
        let nothing = narrow(&whole, &BTreeMap::new(), |text| text);
        assert_eq!(told(&nothing), [(1, 1 + 4 + 32, String::new()), (2, 2 + 8 + 16, String::new())]);
        assert_eq!((nothing.location, nothing.comment), (whole.location, whole.comment));
    }
}
