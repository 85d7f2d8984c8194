//! Tests of the machine that reads pickles.

use proptest::prelude::*;

use super::*;
use crate::error::Error;

fn read(input: &[u8]) -> Result<Pickle<'_>> {
    Pickle::new(input, &mut || Ok(()))
}

fn refusal(input: &[u8]) -> String {
    read(input).map_or_else(|error| error.to_string(), |_| panic!("{input:?} is read"))
}

#[test]
fn values_of_all_kinds() {
    // By hand: (None, True, False, -2, 2**31, 1.5, "é", b"\0", [1], {1: 2}, {3})
    let input = b"\x80\x04(N\x88\x89J\xfe\xff\xff\xff\x8a\x05\0\0\0\x80\0G\x3f\xf8\0\0\0\0\0\0\x8c\x02\xc3\xa9C\x01\0]K\x01a}K\x01K\x02s\x8f(K\x03\x90t.";
    let pickle = read(input).unwrap();
    let Value::Tuple(items) = pickle.value(pickle.root()) else { panic!() };
    let values: Vec<Value> = pickle.tuple(items).iter().map(|&id| pickle.value(id)).collect();
    assert_eq!(
        values[..6],
        [Value::None, Value::Bool(true), Value::Bool(false), Value::Int(-2), Value::Int(1 << 31), Value::Float(1.5)]
    );
    let (Value::Text(text), Value::Bytes(bytes)) = (values[6], values[7]) else { panic!() };
    assert_eq!((pickle.bytes(text), pickle.bytes(bytes)), ("é".as_bytes(), &b"\0"[..]));
    let (Value::List(list), Value::Dict(dict), Value::Set(set)) = (values[8], values[9], values[10]) else { panic!() };
    assert_eq!(pickle.value(pickle.list(list)[0]), Value::Int(1));
    let (key, value) = pickle.dict(dict)[0];
    assert_eq!((pickle.value(key), pickle.value(value)), (Value::Int(1), Value::Int(2)));
    assert_eq!(pickle.value(pickle.list(set)[0]), Value::Int(3));
}

#[test]
fn calls_are_noted_and_shared_values_stay_shared() {
    // x = collections.OrderedDict(); x[1] = x's own memo entry 0, an empty list; state {}.
    let pickle = read(b"\x80\x02]q\x000ccollections\nOrderedDict\n)Rq\x01K\x01h\0s}b.").unwrap();
    let Value::Record(number) = pickle.value(pickle.root()) else { panic!() };
    let record = pickle.record(number);
    assert!(record.state.is_some());
    assert_eq!(pickle.items(record).len(), 1);
    assert!(matches!(pickle.value(pickle.items(record)[0].1), Value::List(_)));
    assert!(pickle.globals().eq([(&b"collections"[..], &b"OrderedDict"[..])]));
}

#[test]
fn getattr_names_a_nested_class_and_nothing_else() {
    // getattr(getattr(a.B, "C"), "D")().
    let pickle =
        read(b"c__builtin__\ngetattr\n(c__builtin__\ngetattr\n(ca\nB\nX\x01\0\0\0CtRX\x01\0\0\0DtR)\x81.").unwrap();
    let Value::Record(number) = pickle.value(pickle.root()) else { panic!() };
    let Value::Global(global) = pickle.value(pickle.record(number).callee) else { panic!() };
    assert_eq!(pickle.global(global), (&b"a"[..], &b"B.C.D"[..]));
    let names: Vec<_> = pickle.globals().map(|(_, name)| name).collect();
    assert_eq!(names, [&b"B"[..], b"B.C", b"B.C.D"]);
    for input in [
        &b"c__builtin__\ngetattr\n."[..],                            // Itself.
        b"cbuiltins\ngetattr\n\x85.",                                // In a tuple.
        b"]cbuiltins\ngetattr\na.",                                  // In a list.
        b"}K\x01cbuiltins\ngetattr\ns.",                             // In a dict.
        b"ca\nb\n)Rcbuiltins\ngetattr\nb.",                          // A state.
        b"cbuiltins\ngetattr\nQ.",                                   // What a container holds.
        b"cbuiltins\ngetattr\n(ca\nb\n)RX\x01\0\0\0ctR.",            // Of an object.
        b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nX\x01\0\0\0ctR.", // Of itself.
        b"cbuiltins\ngetattr\n(ca\nb\nK\x01tR.",                     // By something that is not text.
        b"cbuiltins\ngetattr\n(ca\nb\nX\x01\0\0\0cNtR.",             // With a default.
        b"cbuiltins\ngetattr\n(ca\nb\nX\x01\0\0\0ct}\x92.",          // With keywords.
    ] {
        assert!(read(input).is_err(), "{input:?}");
    }
    assert!(refusal(b"cbuiltins\ngetattr\n.").contains("names 'builtins.getattr', which serves to run programs"));
    let long = [b"ca\n".as_slice(), &[b'b'; MAX_NAME + 1], b"\n."].concat();
    assert!(refusal(&long).contains("a global of 1025 bytes, over the limit of 1024"));
    let length = (MAX_NAME as u32).to_le_bytes();
    let long = [b"cbuiltins\ngetattr\n(ca\nb\nX", &length[..], &[b'c'; MAX_NAME], b"tR."].concat();
    assert!(refusal(&long).contains("a global of 1025 bytes, over the limit of 1024"));
}

#[test]
fn lengths_are_checked_before_anything_is_read() {
    for (input, problem) in [
        (&b""[..], "byte 0 of the pickle: 1 byte needed, but only 0 left"),
        (b"\x80\x02X\xff\xff\xff\xffab.", "byte 2 of the pickle: 4294967295 bytes needed, but only 3 left"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "bytes needed"),
        (b"\x96\xff\xff\xff\xff\0\0\0\0.", "bytes needed"),
        (b"\x95\xff\0\0\0\0\0\0\0N.", "a frame of 255 bytes, but 2 are there"),
        (b"\x8b\xff\xff\xff\x7f.", "an integer of 2147483647 bytes, over the limit of 64"),
        (b"\x80\x06N.", "protocol 6"),
        (b"N.N", "has 1 byte after its end"),
        (b"NN.", "ends with 1 value and"),
        (b"(N.", "ends with 0 values and 1 mark"),
        (b"(.", "empty stack"),
        (b"\x85.", "empty stack"),
        (b"(\x85.", "empty stack"),
        (b"N(\x85.", "empty stack"),
        (b"t.", "a mark that does not exist"),
        (b"h\x05.", "asks the memo for 5"),
        (b"q\0.", "looks at an empty stack"),
        (b"Na.", "empty stack"),
        (b"NNa.", "appends to something that is not a list"),
        (b"NNNs.", "sets an item of something that is not a dict"),
        (b"}(Nu.", "a key without a value"),
        (b"N(N\x90.", "something that is not a set"),
        (b"N)R.", "calls something that is not a global"),
        (b"cos\nsystem\nNR.", "arguments that are not a tuple"),
        (b"cos\nsystem\n)N\x92.", "keyword arguments that are not a dict"),
        (b"NNb.", "gives a state to something that is not an object"),
        (b"cos\nsystem\nNb.", "gives a state to something that is not an object"),
        (b"ca\nb\n)\x81NbNb.", "a second state"),
        (b"NN\x93.", "something that is not text"),
        (b"cos", "a line without an end"),
        (b"\x82\x01.", "0x82 is an extension code"),
        (b"\x83\x01\0.", "0x83 is an extension code"),
        (b"\x84\x01\0\0\0.", "0x84 is an extension code"),
        (b"\x97.", "out-of-band buffer"),
        (b"I1\n.", "protocols 0 and 1"),
        (b"(ios\nsystem\n.", "protocols 0 and 1"),
        (b"(cos\nsystem\no.", "protocols 0 and 1"),
        (b"Px\n.", "protocols 0 and 1"),
        (b"\xff.", "0xff is not an opcode"),
    ] {
        let text = refusal(input);
        assert!(text.contains(problem), "{input:?}: {text}");
    }
}

#[test]
fn a_memo_of_any_number_takes_no_more_memory() {
    let pickle = read(b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff\x86.").unwrap();
    assert_eq!(pickle.len(), 5);
}

#[test]
fn what_is_reached_is_what_leads_there() {
    // A list that holds itself twice, and a global that was put away.
    let pickle = read(b"\x80\x02ca\nb\n0]q\0(h\0h\0e.").unwrap();
    let seen = pickle.reachable(&[pickle.root()]).unwrap();
    let global = (0..pickle.len()).find(|&id| matches!(pickle.value(id as Id), Value::Global(_))).unwrap();
    assert!(!seen[global]);
    assert_eq!(seen.iter().filter(|&&seen| seen).count(), 1);
}

#[test]
fn the_poll_is_asked_and_can_stop_it() {
    let input = [&b"\x80\x02"[..], &[b'N', b'0'].repeat(1 << 17), b"N."].concat();
    let mut asked = 0;
    let stopped = Pickle::new(&input, &mut || {
        asked += 1;
        if asked == 3 { Err(Error::Interrupted) } else { Ok(()) }
    });
    assert_eq!(stopped.err(), Some(Error::Interrupted));
}

proptest! {
    /// No input panics, and what it costs stays in proportion.
    #[test]
    fn any_bytes_are_read_or_refused(input in prop::collection::vec(prop_oneof![
        any::<u8>(),
        prop::sample::select(b"().012GJKMNQRXabcd}ehjl]qrstu\x80\x81\x85\x86\x87\x88\x8c\x8f\x90\x91\x93\x94\n".to_vec()),
    ], 0..80)) {
        if let Ok(pickle) = read(&input) {
            prop_assert!(pickle.len() <= input.len() + 4);
            prop_assert!(pickle.reachable(&[pickle.root()]).unwrap()[pickle.root() as usize]);
        }
    }
}
