//! Tests of TensorFlow's texts and messages.

use proptest::prelude::*;
use std::sync::Arc;

use super::*;
use crate::error::ErrorKind;

mod answers;

fn devices(count: usize, device_type: &str) -> DeviceList {
    let mut list = DeviceList::default();
    (0..count).for_each(|i| list.push(&format!("/job:worker/replica:0/task:{}/device:{device_type}:{i}", i / 4)));
    list
}

fn parts(shape: &[i64]) -> MeshParts {
    let size = usize::try_from(shape.iter().product::<i64>()).unwrap();
    MeshParts {
        dim_names: (0..shape.len()).map(|axis| format!("a{axis}")).collect(),
        shape: shape.to_vec(),
        global_ids: Ids::consecutive(0, size),
        local_ids: (0..size as i64).collect(),
        local_devices: devices(size, "TPU"),
        ..MeshParts::default()
    }
}

fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

prop_compose! {
    fn any_mesh()(
        shape in prop::collection::vec(1..4_i64, 1..4),
        name in "[a-zé ]{0,6}",
        names in prop::collection::hash_set("[a-zA-Zé _;]{1,4}0", 4),
        first in prop_oneof![Just(0), 0..1000_i64, Just(i64::MAX - 100)],
        held in any::<u8>(),
        global in any::<bool>(),
        use_xla_spmd in any::<bool>(),
    ) -> Mesh {
        let mut parts = parts(&shape);
        let size = parts.local_ids.len();
        // Some clients hold none of the devices, and then the global ones have to be named.
        let held = usize::from(held) % (size + 1);
        parts.name = name;
        parts.dim_names = names.into_iter().take(shape.len()).collect();
        parts.global_ids = Ids::consecutive(first, size);
        parts.local_ids = (0..held as i64).rev().map(|i| first + i).collect();
        parts.local_devices = devices(held, "TPU");
        parts.global_devices = if global || held == 0 { devices(size, "TPU") } else { DeviceList::default() };
        parts.use_xla_spmd = use_xla_spmd;
        Mesh::new(parts).unwrap()
    }
}

prop_compose! {
    fn any_layout()(
        mesh in any_mesh(),
        order in Just((0..6_usize).collect::<Vec<_>>()).prop_shuffle(),
        rank in 0..7_usize,
        special in prop::collection::vec(0..3_usize, 6),
        parted in any::<bool>(),
    ) -> Layout {
        let names = mesh.dim_names().to_vec();
        let mut matched = false;
        let mut spec = |(dim, &axis): (usize, &usize)| match (names.get(axis), special[dim]) {
            (Some(name), _) => name.clone(),
            (None, 2) if !std::mem::replace(&mut matched, true) => MATCH.to_owned(),
            (None, 1) => ANY.to_owned(),
            _ => UNSHARDED.to_owned(),
        };
        let specs: Vec<String> = order[..rank.min(6)].iter().enumerate().map(&mut spec).collect();
        let kind = if parted { LayoutKind::Parted } else { LayoutKind::Static };
        Layout::new(kind, &specs, Arc::new(mesh)).unwrap()
    }
}

/// A change to a text or to bytes: what to cut out, where, and what to put there.
fn any_change() -> impl Strategy<Value = (prop::sample::Index, usize, Vec<u8>)> {
    let scraps = prop_oneof![
        "[|,=:* 0-9+-]{0,3}".prop_map(String::into_bytes),
        Just(b"use_xla_spmd".to_vec()),
        Just(b"99999999999999999999".to_vec()),
        prop::collection::vec(any::<u8>(), 0..4),
    ];
    (any::<prop::sample::Index>(), 0..4_usize, scraps)
}

fn changed(mut bytes: Vec<u8>, changes: &[(prop::sample::Index, usize, Vec<u8>)]) -> Vec<u8> {
    for (at, cut, scrap) in changes {
        let at = at.index(bytes.len() + 1);
        let end = (at + cut).min(bytes.len());
        bytes.splice(at..end, scrap.iter().copied());
    }
    bytes
}

proptest! {
    #[test]
    fn a_mesh_comes_back_from_text_and_bytes(mesh in any_mesh()) {
        prop_assert_eq!(Mesh::from_text(&mesh.to_text()), Ok(mesh.clone()));
        prop_assert_eq!(Mesh::from_bytes(&mesh.to_bytes()), Ok(mesh.clone()));
        prop_assert_eq!(MeshMessage::decode(&mesh.to_bytes()).unwrap().encode(), mesh.to_bytes());
        let host = mesh.host_mesh().unwrap();
        prop_assert_eq!(host.device_type(), "CPU");
        prop_assert_eq!(host.host_mesh(), Ok(host.clone()));
    }

    #[test]
    fn a_layout_comes_back_from_text_and_bytes(layout in any_layout()) {
        prop_assert_eq!(Layout::from_text(&layout.to_text()), Ok(layout.clone()));
        prop_assert_eq!(Layout::from_bytes(&layout.to_bytes()), Ok(layout.clone()));
        prop_assert_eq!(LayoutMessage::decode(&layout.to_bytes()).unwrap().encode(), layout.to_bytes());
        prop_assert_eq!(layout.delete(&[]), Ok(layout.clone()));
    }

    #[test]
    fn any_text_is_read_or_refused(text in any::<String>()) {
        let _ = (Mesh::from_text(&text), Layout::from_text(&text));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = (Mesh::from_bytes(&bytes), Layout::from_bytes(&bytes));
    }

    #[test]
    fn a_changed_text_is_refused_or_says_what_it_then_says(
        layout in any_layout(), changes in prop::collection::vec(any_change(), 1..4),
    ) {
        let text = String::from_utf8_lossy(&changed(layout.to_text().into_bytes(), &changes)).into_owned();
        if let Ok(read) = Layout::from_text(&text) {
            prop_assert_eq!(read.to_text(), text);
        }
        let text = String::from_utf8_lossy(&changed(layout.mesh().to_text().into_bytes(), &changes)).into_owned();
        if let Ok(read) = Mesh::from_text(&text) {
            // Only the made-up form is not what is written.
            prop_assert!(read.to_text() == text || text.contains('*'));
        }
    }

    #[test]
    fn changed_bytes_are_refused_or_read(layout in any_layout(), changes in prop::collection::vec(any_change(), 1..4)) {
        if let Ok(read) = Layout::from_bytes(&changed(layout.to_bytes(), &changes)) {
            prop_assert_eq!(Layout::from_bytes(&read.to_bytes()), Ok(read));
        }
        if let Ok(read) = Mesh::from_bytes(&changed(layout.mesh().to_bytes(), &changes)) {
            prop_assert_eq!(Mesh::from_bytes(&read.to_bytes()), Ok(read));
        }
    }

    #[test]
    fn bytes_that_are_cut_off_are_refused_or_mean_less(layout in any_layout(), at in any::<prop::sample::Index>()) {
        let bytes = layout.to_bytes();
        let cut = &bytes[..at.index(bytes.len())];
        prop_assert_ne!(Layout::from_bytes(cut), Ok(layout));
    }
}

#[test]
fn texts_with_something_wrong_name_the_byte() {
    let devices = "CPU:0,CPU:1";
    for (text, at) in [
        ("", 0),
        ("foo", 0),
        ("a|b", 0),
        ("|||||||||", 0),
        ("m|x2|0,1|0,1|CPU:0,CPU:1", 2),
        ("m|x=|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=+2|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=2abc|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=2.5|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=0x2|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=2=3|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=02|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=9223372036854775808|0,1|0,1|CPU:0,CPU:1", 4),
        ("m|x=2,|0,1|0,1|CPU:0,CPU:1", 6),
        ("m|x=2|0,,1|0,1|CPU:0,CPU:1", 8),
        ("m|x=2|0,1|0,9223372036854775808|CPU:0,CPU:1", 12),
        ("m|x=2|0,1|0,1|CPU:0,CPU:1,", 26),
        ("m|x=2|0,1|0,1|CPU:0,FOO:1", 20),
        ("m|x=2|0,1|0,1|CPU:0,CPU:1|", 26),
        ("m|x=2|0,1|0,1|CPU:0,CPU:1||use_xla_spmd", 26),
        ("m|x=2|0,1|0,1|CPU:0,CPU:1|CPU:0,CPU:1|use_xla", 38),
        ("m|x=2|0,1|0,1|CPU:0,CPU:1|CPU:0,CPU:1|use_xla_spmd|", 0),
        ("m|x=2|0,1|0,1|CPU:0,CPU:1\0", 25),
        ("m|x=2|CPU", 6),
        ("m|x=2|*", 7),
        ("m|x=2|*C*", 7),
        ("m|x=1048577|*CPU", 2),
    ] {
        let error = Mesh::from_text(text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse, "{text}: {error}");
        assert!(error.to_string().starts_with(&format!("mesh text, byte {at}: ")), "{text}: {error}");
    }
    let mesh = format!("|x=2|0,1|0,1|{devices}");
    for (text, at) in [
        (String::new(), 0),
        (format!("sharding_specs:x,mesh:{mesh}"), 46),
        (format!("sharding_specs:x mesh:{mesh}"), 16),
        (format!("specs:x, mesh:{mesh}"), 0),
        ("maximal:false, mesh:CPU:0".to_owned(), 8),
        ("sharding_specs:x, mesh:|x=2|0,1|0,1|CPU:0,!".to_owned(), 42),
    ] {
        let error = Layout::from_text(&text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse, "{text}: {error}");
        assert!(error.to_string().starts_with(&format!("layout text, byte {at}: ")), "{text}: {error}");
    }
}

#[test]
fn texts_of_no_mesh_are_mesh_errors() {
    for text in [
        "||0|0|CPU:0",
        "n||*CPU",
        "n|x=4|||",
        "m|x=0|*CPU",
        "m|x=2|0,1|0,1|CPU:0",
        "m|x=2|0,2|0,2|CPU:0,CPU:1",
        "m|x=2|1,0|0,1|CPU:0,CPU:1",
        "m|x=2|0,1|0,2|CPU:0,CPU:1",
        "m|x=2|0,1|1,1|CPU:0,CPU:1",
        "m|x=2|0,1|0,1|GPU:0,GPU:0",
        "m|x=2|0,1|0,1|CPU:0,GPU:1",
        "m|x=2|0,1|0,1|CPU:0,/job:a",
        "m|x=3|0,1,2|0,1,2|CPU:0,CPU:1,CPU:0",
        "m|x=2|0,1|||CPU:0",
        "m|x=2|0,1||",
        "m|x=1,x=2|0,1|0,1|CPU:0,CPU:1",
        "m|=2|0,1|0,1|CPU:0,CPU:1",
        "m|any=2|0,1|0,1|CPU:0,CPU:1",
        "m|x:=2|0,1|0,1|CPU:0,CPU:1",
        "m,|x=2|0,1|0,1|CPU:0,CPU:1",
        "m|x=2|0,1|0,1|CPU:0,CPU:1|use_xla_spmd",
        "/job:a",
    ] {
        assert_eq!(kind_of(Mesh::from_text(text)), ErrorKind::Mesh, "{text}");
    }
    let wide = "m|x=4294967296,y=4294967296|0|0|CPU:0";
    assert_eq!(kind_of(Mesh::from_text(wide)), ErrorKind::Overflow);
}

#[test]
fn what_tensorflow_drops_or_wraps_is_kept() {
    let text = "m|x=2|0,1|0|TPU:0|TPU:0,TPU:1|use_xla_spmd";
    assert_eq!(Mesh::from_text(text).unwrap().to_text(), text);
    let repeated = "|x=2|7,8|7,8|CPU:0,CPU:0";
    assert_eq!(Mesh::from_text(repeated).unwrap().to_text(), repeated);
    let made_up = Mesh::from_text("n|x=2|*TPU").unwrap();
    assert_eq!(
        made_up.to_text(),
        "n|x=2|0,1|0,1|/job:localhost/task:0/device:TPU:0,/job:localhost/task:0/device:TPU:1"
    );
}

#[test]
fn messages_with_something_wrong_name_the_byte() {
    for (bytes, at, problem) in [
        (&b"\x80"[..], 0, "cut off"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", 0, "over 64 bits"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 0, "over 64 bits"),
        (b"\x00", 0, "no field has the number 0"),
        (b"\xf8\xff\xff\xff\x7f\x00", 0, "no field has the number"),
        (b"\x1a\x05ab", 1, "a length of 5 with 2 bytes left"),
        (b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 1, "a length of"),
        (b"\x1a\x03a\xffb", 3, "not valid UTF-8"),
        (b"\x18\x01", 0, "another wire type than a text"),
        (b"\x0a\x03\x0a\x01a\x1a\x00\x19\x00\x00\x00\x00\x00\x00\x00\x00", 7, "another wire type than a text"),
        (b"\x12\x02\x01\x80", 3, "cut off"),
        (b"\x15\x00\x00\x00\x00", 0, "another wire type than a number"),
        (b"\x3a\x00", 0, "another wire type than a number"),
        (b"\x0a\x02\x10\x80", 3, "cut off"),
        (b"\x7c", 0, "the end of a group"),
        (b"\x7b\x74", 2, "another group"),
        (b"\x7b", 1, "cut off"),
        (b"\x7e", 1, "no wire type"),
        (b"\x79\x00", 1, "8 bytes needed, 1 left"),
        (b"\x07", 0, "no field has the number 0"),
        (b"\xff\xff\xff\xff\x0f", 5, "no wire type has the number 7"),
        (b"\x0a\x02\x0a\x05", 3, "MeshDimensionProto"),
    ] {
        let error = MeshMessage::decode(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse);
        let text = error.to_string();
        assert!(text.contains(&format!("byte {at}: ")) && text.contains(problem), "{bytes:x?}: {text}");
    }
    for (bytes, problem) in
        [(&b"\x18\x07"[..], "type is 7"), (b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "type is -1")]
    {
        let text = LayoutMessage::decode(bytes).unwrap_err().to_string();
        assert!(text.contains(problem), "{text}");
    }
    assert_eq!(kind_of(MeshMessage::decode(&b"\x7b".repeat(100_000))), ErrorKind::Parse);
}

#[test]
fn unknown_fields_are_skipped() {
    let mesh = Mesh::new(parts(&[2, 2])).unwrap();
    let mut bytes = mesh.to_bytes();
    // Field 15 as a number, eight bytes, a text, a group with a text and a group in it, four bytes.
    bytes.extend(b"\x78\x01\x79\x00\x00\x00\x00\x00\x00\x00\x00\x7a\x01a");
    bytes.extend(b"\x7b\x72\x01a\x73\x08\x01\x74\x7c\x7d\x00\x00\x00\x00");
    // Groups in each other, as deep as is allowed, and one more.
    let groups = |depth: usize| [&bytes[..], &b"\x7b".repeat(depth), &b"\x7c".repeat(depth)].concat();
    assert_eq!(Mesh::from_bytes(&groups(100)).as_ref(), Ok(&mesh));
    let too_deep = Mesh::from_bytes(&groups(101)).unwrap_err().to_string();
    assert!(too_deep.ends_with("groups more than 100 deep"), "{too_deep}");
    assert_eq!(Mesh::from_bytes(&bytes), Ok(mesh));
}

#[test]
fn numbers_may_be_packed_or_not_and_messages_merge() {
    let mesh = Mesh::from_text("n|x=2|0,1|0,1|CPU:0,CPU:1").unwrap();
    let bytes =
        b"\x0a\x05\x0a\x01x\x10\x02\x10\x00\x10\x01\x22\x01\x00\x20\x01\x1a\x01m\x1a\x01n\x2a\x05CPU:0\x2a\x05CPU:1";
    assert_eq!(Mesh::from_bytes(bytes), Ok(mesh.clone()));
    let mut twice = vec![0x12, 9];
    twice.extend(&bytes[..9]);
    twice.extend([0x12, u8::try_from(bytes.len() - 9).unwrap()]);
    twice.extend(&bytes[9..]);
    twice.extend([0x18, 1]);
    assert_eq!(Layout::from_bytes(&twice).unwrap().mesh().as_ref(), &mesh);
}

#[test]
fn messages_of_no_mesh_are_mesh_errors() {
    let good = MeshMessage::decode(&Mesh::new(parts(&[2])).unwrap().to_bytes()).unwrap();
    type Change = fn(&mut MeshMessage);
    let changes: [Change; 10] = [
        |m| m.mesh_dimensions[0].1 = 0,
        |m| m.mesh_dimensions[0].1 = -2,
        |m| m.mesh_dimensions[0].0 = "a|b".into(),
        |m| m.mesh_dimensions.clear(),
        |m| m.global_device_ids = vec![0],
        |m| m.global_device_ids = vec![-1, 0],
        |m| m.local_device_ids = vec![0, 5],
        |m| m.local_devices = DeviceList::from_joined("TPU:0,x"),
        |m| m.single_device = "CPU:0".into(),
        |m| *m = MeshMessage { name: "n".into(), ..MeshMessage::default() },
    ];
    for change in changes {
        let mut message = good.clone();
        change(&mut message);
        assert_eq!(kind_of(Mesh::from_bytes(&message.encode())), ErrorKind::Mesh, "{message:?}");
    }
}

#[test]
fn specs_without_a_definite_cut() {
    let mesh = Arc::new(Mesh::new(parts(&[2, 3])).unwrap());
    let layout = Layout::new(LayoutKind::Static, &["a1", MATCH, ANY, ANY], Arc::clone(&mesh)).unwrap();
    assert_eq!(layout.num_shards(0), Ok(3));
    assert_eq!(kind_of(layout.num_shards(1)), ErrorKind::Layout);
    assert_eq!(kind_of(layout.num_shards(4)), ErrorKind::Layout);
    assert_eq!(kind_of(layout.cuts()), ErrorKind::Layout);
    assert_eq!(kind_of(layout.local_shape(&[3, 1, 1, 1])), ErrorKind::Layout);
    assert_eq!(kind_of(Layout::new(LayoutKind::Static, &[MATCH, MATCH], Arc::clone(&mesh))), ErrorKind::Layout);
    assert_eq!(kind_of(Layout::new(LayoutKind::Static, &["a1", "a1"], Arc::clone(&mesh))), ErrorKind::Layout);
    assert_eq!(kind_of(Layout::new(LayoutKind::Static, &["q"], Arc::clone(&mesh))), ErrorKind::Layout);
    assert_eq!(kind_of(Layout::new(LayoutKind::Empty, &["a1"], mesh)), ErrorKind::Layout);
}

#[test]
fn shapes_are_exact_or_refused() {
    let mesh = Arc::new(Mesh::new(parts(&[2, 3])).unwrap());
    let layout = Layout::new(LayoutKind::Static, &["a1", UNSHARDED], mesh).unwrap();
    assert_eq!(layout.local_shape(&[9, 5]), Ok(vec![3, 5]));
    assert_eq!(layout.local_shape(&[-1, 5]), Ok(vec![-1, 5]));
    assert_eq!(layout.global_shape(&[-1, 5]), Ok(vec![-1, 5]));
    assert_eq!(kind_of(layout.local_shape(&[10, 5])), ErrorKind::Layout);
    assert_eq!(kind_of(layout.local_shape(&[9])), ErrorKind::Layout);
    assert_eq!(kind_of(layout.local_shape(&[-3, 5])), ErrorKind::Layout);
    assert_eq!(kind_of(layout.global_shape(&[i64::MAX, 5])), ErrorKind::Overflow);
    assert_eq!(kind_of(Layout::cut_at(Arc::clone(layout.mesh()), "a0", 0, 0)), ErrorKind::Layout);
    assert_eq!(kind_of(Layout::cut_at(Arc::clone(layout.mesh()), "a0", 2, -1)), ErrorKind::Layout);
    assert_eq!(kind_of(Layout::replicated(Arc::clone(layout.mesh()), -1)), ErrorKind::Layout);
    assert_eq!(kind_of(Layout::replicated(Arc::clone(layout.mesh()), 255)), ErrorKind::Layout);
}
