//! What a mesh and a layout answer, by hand for small ones.

use super::*;
use crate::error::Error as CoreError;

#[test]
fn a_mesh_tells_its_strides_size_and_coordinates() {
    let mesh = Mesh::new(parts(&[2, 3])).unwrap();
    assert_eq!((mesh.strides(), mesh.size()), (&[3, 1][..], 6));
    for (index, coordinate) in [(0, [0, 0]), (4, [1, 1]), (5, [1, 2]), (7, [0, 1]), (-1, [1, 2])] {
        let mut out = [9; 2];
        mesh.wrapped_coordinate(index, &mut out);
        assert_eq!(out, coordinate);
    }
    for none in [Mesh::Empty, Mesh::from_device("CPU:0").unwrap()] {
        assert_eq!((none.strides(), none.size()), (&[][..], 0));
        let mut out = [9];
        none.wrapped_coordinate(3, &mut out);
        assert_eq!(out, [9]);
    }
}

#[test]
fn what_has_no_axes_comes_back_from_text_and_bytes_and_has_nothing_else() {
    let single = Mesh::from_device("/job:a/device:TPU:3").unwrap();
    for mesh in [single.clone(), Mesh::Empty] {
        assert_eq!(Mesh::from_bytes(&mesh.to_bytes()), Ok(mesh.clone()));
        assert_eq!(Mesh::from_text(&mesh.to_text()), Ok(mesh));
    }
    let on_it = Layout::on_single_device(Arc::new(single.clone())).unwrap();
    for layout in [on_it, Layout::empty()] {
        assert_eq!(Layout::from_bytes(&layout.to_bytes()), Ok(layout.clone()));
        assert_eq!(Layout::from_text(&layout.to_text()), Ok(layout));
    }
    let mut message = MeshMessage::decode(&single.to_bytes()).unwrap();
    message.use_xla_spmd = true;
    let refused = Mesh::from_bytes(&message.encode()).unwrap_err().to_string();
    assert_eq!(refused, "the message of a single-device mesh has use_xla_spmd, which only a mesh with axes has");
}

#[test]
fn a_message_has_only_the_fields_that_say_something() {
    assert_eq!(MeshMessage { name: "n".into(), ..MeshMessage::default() }.encode(), b"\x1a\x01n");
}

#[test]
fn a_layout_that_does_not_go_with_its_mesh_is_refused_in_words() {
    let meshes = [Mesh::Empty, Mesh::from_device("CPU:0").unwrap(), Mesh::new(parts(&[2])).unwrap()].map(Arc::new);
    let kinds = [LayoutKind::Empty, LayoutKind::SingleDevice, LayoutKind::Static, LayoutKind::Parted];
    let layouts = ["an empty layout", "a single-device layout", "a static layout", "a parted layout"];
    let forms = ["an empty mesh", "a single-device mesh", "a mesh with axes"];
    for (kind, (layout, fits)) in kinds.into_iter().zip(layouts.into_iter().zip([0, 1, 2, 2])) {
        for (i, (mesh, form)) in meshes.iter().zip(forms).enumerate() {
            let made = Layout::new::<&str>(kind, &[], Arc::clone(mesh)).map_err(|error| error.to_string());
            let expected = if i == fits { Ok(kind) } else { Err(format!("{layout} cannot be on {form}")) };
            assert_eq!(made.map(|layout| layout.kind()), expected);
        }
    }
}

#[test]
fn a_layout_tells_what_it_cuts() {
    let mesh = Arc::new(Mesh::new(parts(&[2, 3])).unwrap());
    let of = |specs: &[&str]| Layout::new(LayoutKind::Static, specs, Arc::clone(&mesh)).unwrap();
    for (specs, replicated, batch, shards) in [
        (&[][..], true, false, vec![]),
        (&[UNSHARDED, UNSHARDED], true, false, vec![1, 1]),
        (&["a1", UNSHARDED], false, true, vec![3, 1]),
        (&[UNSHARDED, "a0"], false, false, vec![1, 2]),
        (&["a1", UNSHARDED, "a0"], false, false, vec![3, 1, 2]),
    ] {
        let layout = of(specs);
        assert_eq!((layout.is_fully_replicated(), layout.is_batch_parallel()), (replicated, batch), "{specs:?}");
        assert_eq!(layout.all_num_shards(), Ok(shards));
        let parted = layout.to_parted().unwrap();
        assert_eq!((parted.kind(), parted.specs()), (LayoutKind::Parted, layout.specs()));
    }
    assert_eq!(of(&["a1", UNSHARDED]).specs(), [Spec::Axis(1), Spec::Unsharded]);
    let single = Layout::on_single_device(Arc::new(Mesh::from_device("CPU:0").unwrap())).unwrap();
    assert!(!single.is_fully_replicated() && !single.is_batch_parallel());
    for spec in [MATCH, ANY] {
        let text = of(&[spec]).all_num_shards().unwrap_err().to_string();
        assert_eq!(text, format!("sharding_specs[0] is {spec:?}, which leaves open how the dim is cut"));
    }
}

#[test]
fn shards_are_numbered_row_by_row() {
    let mesh = Arc::new(Mesh::new(parts(&[2, 3])).unwrap());
    let layout = Layout::new(LayoutKind::Static, &["a1", UNSHARDED, "a0"], mesh).unwrap();
    let indices: Vec<i64> = (0..3).flat_map(|i| (0..2).flat_map(move |k| [i, 0, k])).collect();
    let mut ids = [9; 6];
    layout.shard_ids_into(&indices, &mut ids).unwrap();
    assert_eq!(ids, [0, 1, 2, 3, 4, 5]);
    for (index, id) in indices.chunks(3).zip(0..) {
        assert_eq!(layout.shard_id(index), Ok(id));
    }
    for (index, dim, limit) in [([3, 0, 0], 0, 3), ([-1, 0, 0], 0, 3), ([0, 1, 0], 1, 1), ([0, 0, 2], 2, 2)] {
        let refused = |position| {
            let position = Some(position);
            Error::from(CoreError::OutOfRange { what: "offset_tuple", position, value: index[dim], limit })
        };
        assert_eq!(layout.shard_id(&index), Err(refused(dim)));
        let two = [&[0, 0, 1], &index[..]].concat();
        assert_eq!(layout.shard_ids_into(&two, &mut [9; 2]), Err(refused(3 + dim)));
    }
    let rank = |given| Error::IndexRank { given, rank: 3 };
    assert_eq!(layout.shard_id(&[0, 0]), Err(rank(2)));
    assert_eq!(layout.shard_ids_into(&indices, &mut [9; 3]), Err(rank(6)));
}

#[test]
fn alike_names_are_read_as_each_would_be_alone() {
    let names = [
        "CPU:0",
        "CPU:1",
        "CPU",
        "CPU5",
        "CP5",
        "5",
        "/job:a/device:CPU:0",
        "/job:a/device:CPU:12",
        "/job:a/device:CPU:*",
        "/device:CPU:3/task:5",
        "/device:CPU:3/task:6",
    ];
    for pair in names.iter().flat_map(|a| names.map(|b| [*a, b])) {
        let list = DeviceList::from_joined(&pair.join(","));
        let alone = pair.map(|name| DeviceSpec::parse(name).ok());
        assert_eq!(list.specs().map(|spec| spec.ok()).collect::<Vec<_>>(), alone, "{pair:?}");
    }
}

#[test]
fn texts_of_more_than_there_can_be_name_the_limit() {
    let axes = |count: usize| (0..count).map(|i| format!("a{i}=1")).collect::<Vec<_>>().join(",");
    assert!(Mesh::from_text(&format!("m|{}|0|0|CPU:0", axes(64))).is_ok());
    let specs = |count: usize| format!("sharding_specs:{} mesh:|x=1|0|0|CPU:0", "unsharded,".repeat(count));
    assert_eq!(Layout::from_text(&specs(254)).map(|layout| layout.rank()), Ok(254));
    assert_eq!(Mesh::from_text("m|x=1048576|*CPU").map(|mesh| mesh.size()), Ok(1 << 20));
    let long = "y".repeat(61);
    let entry = format!("byte 2: \"{}\"… is not `name=size`", &long[1..]);
    for (text, problem) in [
        (format!("m|{}|0|0|CPU:0", axes(65)), "byte 2: 65 axes; a mesh has at most 64"),
        ("a|b".to_owned(), "a mesh has 1, 3, 5, 6 or 7 fields between `|`, not 2"),
        ("|".repeat(7), "a mesh has 1, 3, 5, 6 or 7 fields between `|`, not more than 7"),
        ("m|y|0|0|CPU:0".to_owned(), "byte 2: \"y\" is not `name=size`"),
        (format!("m|{long}|0|0|CPU:0"), &entry),
    ] {
        let error = Mesh::from_text(&text).unwrap_err();
        assert!(error.kind() == ErrorKind::Parse && error.to_string().ends_with(problem), "{error}");
    }
    let error = Layout::from_text(&specs(255)).unwrap_err().to_string();
    assert!(error.ends_with("byte 15: 255 specs; a layout has at most 254"), "{error}");
}
