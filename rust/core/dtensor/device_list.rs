//! Lists of device names, as those of a mesh.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::device::{DeviceProblem, DeviceSpec, number};

/// Device names in order, kept as their text form: joined by commas in one buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct DeviceList {
    joined: String,
    ends: Vec<usize>,
}

impl DeviceList {
    /// An empty list with room for `devices` names.
    #[must_use]
    pub fn with_capacity(devices: usize) -> Self {
        Self { joined: String::new(), ends: Vec::with_capacity(devices) }
    }

    /// The names in `joined`, which are separated by commas; an empty text holds none.
    #[must_use]
    pub fn from_joined(joined: &str) -> Self {
        if joined.is_empty() {
            return Self::default();
        }
        let mut ends = Vec::with_capacity(joined.bytes().filter(|&b| b == b',').count() + 1);
        ends.extend(joined.match_indices(',').map(|(at, _)| at));
        ends.push(joined.len());
        Self { joined: joined.to_owned(), ends }
    }

    /// Appends a name. It may be anything: what is not a device name is found by the mesh that takes the list.
    pub fn push(&mut self, device: &str) {
        if !self.ends.is_empty() {
            self.joined.push(',');
        }
        self.joined.push_str(device);
        self.ends.push(self.joined.len());
    }

    /// The number of names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True if there are no names.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// All names, joined by commas.
    #[must_use]
    pub fn joined(&self) -> &str {
        &self.joined
    }

    /// The name at `position`, if there is one.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<&str> {
        let start = if position == 0 { 0 } else { self.ends.get(position - 1)? + 1 };
        self.joined.get(start..*self.ends.get(position)?)
    }

    /// The names in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let device = &self.joined[start..end];
            start = end + 1;
            device
        })
    }

    /// The parts of each name in order, or why it is not a device name.
    pub(super) fn specs(&self) -> impl Iterator<Item = Result<DeviceSpec<'_>, DeviceProblem>> {
        let mut reader = SpecReader::default();
        self.iter().map(move |device| reader.read(device))
    }

    /// The positions of two names of one device, if there are such; every name must parse.
    ///
    /// They are sorted by a hash, which takes a fifth of the memory of a set of them.
    pub(super) fn duplicate(&self) -> Option<(usize, usize)> {
        let spec = |position: usize| DeviceSpec::parse(self.get(position).unwrap_or_default()).unwrap_or_default();
        let hash = |spec: DeviceSpec<'_>| {
            let mut hasher = DefaultHasher::new();
            spec.hash(&mut hasher);
            hasher.finish()
        };
        let hashes = self.specs().map(|spec| hash(spec.unwrap_or_default()));
        let mut hashed: Vec<(u64, usize)> = Vec::with_capacity(self.len());
        hashed.extend(hashes.zip(0..));
        hashed.sort_unstable_by(|&(a, i), &(b, j)| a.cmp(&b).then_with(|| spec(i).cmp(&spec(j))).then(i.cmp(&j)));
        let equal = |pair: &&[(u64, usize)]| pair[0].0 == pair[1].0 && spec(pair[0].1) == spec(pair[1].1);
        hashed.windows(2).filter(equal).map(|pair| (pair[0].1, pair[1].1)).min_by_key(|&(_, second)| second)
    }
}

/// Reads device names that are alike, as those of a mesh are: one that differs from the name before it in no more than
/// the index at its end is that one with another index.
#[derive(Debug, Clone, Copy, Default)]
struct SpecReader<'a> {
    /// The name before, up to and with the colon before its index; empty if it does not end with an index.
    alike: &'a str,
    spec: DeviceSpec<'a>,
}

impl<'a> SpecReader<'a> {
    /// The parts of the next name.
    fn read(&mut self, text: &'a str) -> Result<DeviceSpec<'a>, DeviceProblem> {
        if let Some(index) = text.strip_prefix(self.alike)
            && !self.alike.is_empty()
            && let Ok(index) = number(index)
        {
            self.spec.device_index = Some(index);
            return Ok(self.spec);
        }
        self.spec = DeviceSpec::parse(text)?;
        self.alike = "";
        let last = text.rfind('/').map_or(0, |slash| slash + 1);
        let other_number = ["job:", "replica:", "task:"].iter().any(|part| text[last..].starts_with(part));
        if self.spec.device_index.is_some() && !other_number {
            self.alike = &text[..text.rfind(':').map_or(0, |colon| colon + 1)];
        }
        Ok(self.spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn duplicates_are_found_in_any_order_and_form() {
        let list = |text: &str| DeviceList::from_joined(text);
        assert_eq!(list("CPU:0,CPU:1,CPU:2").duplicate(), None);
        assert_eq!(list("CPU:2,CPU:0,CPU:1").duplicate(), None);
        assert_eq!(list("CPU:2,CPU:0,/device:cpu:2,CPU:0").duplicate(), Some((0, 2)));
        assert_eq!(list("CPU:0,CPU:0").duplicate(), Some((0, 1)));
    }

    proptest! {
        #[test]
        fn names_read_one_after_the_other_are_read_alike(
            names in prop::collection::vec("(/job:[ab])?(/task:[0-2])?/?(device:)?(CPU|gpu):(0|1|12|01|x|[*])(/task:[3-5])?", 1..9),
        ) {
            let list = DeviceList::from_joined(&names.join(","));
            let alone: Vec<_> = names.iter().map(|name| DeviceSpec::parse(name)).collect();
            prop_assert_eq!(list.specs().collect::<Vec<_>>(), alone);
        }

        #[test]
        fn a_list_is_its_joined_text(names in prop::collection::vec("[a-zé:/0-9]{1,12}", 0..9)) {
            let mut list = DeviceList::default();
            names.iter().for_each(|name| list.push(name));
            prop_assert_eq!(list.iter().collect::<Vec<_>>(), names.clone());
            prop_assert_eq!((0..list.len()).filter_map(|i| list.get(i)).collect::<Vec<_>>(), names.clone());
            prop_assert_eq!(list.joined(), names.join(","));
            prop_assert_eq!(DeviceList::from_joined(list.joined()), list);
        }
    }
}
