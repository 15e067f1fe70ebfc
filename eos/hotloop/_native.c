/* The functions of python.py, compiled: what they mean is written there, and only there.
 *
 * What makes this faster than the interpreter: the getters of confluent-kafka's Message and its `produce` are called
 * without the interpreter between, and the fields of Record and Out are read and filled at their place in the object.
 * All of it is looked up or tried out: what is of another kind takes the way by name.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* What a Message is asked for; Record and Out have fields of these names, Record in this order up to HEADERS. */
enum name { TOPIC, PARTITION, OFFSET, TIMESTAMP, KEY, VALUE, HEADERS, ERROR, NAMES };
enum { FIELDS = HEADERS + 1 }; /* of a Record */
static const char *const texts[NAMES] = {
    "topic", "partition", "offset", "timestamp", "key", "value", "headers", "error",
};
static PyObject *names[NAMES]; /* of `texts` */
static PyObject *empty, *zero, *minus_one;

/* ---- fields of Record and Out ------------------------------------------------------------------------------------ */

typedef struct {
    PyTypeObject *type; /* whose objects have the field at `offset` */
    Py_ssize_t offset;  /* 0: by name */
    PyObject *name;
} Field;

static Field field_of(PyTypeObject *type, PyObject *name) {
    Field field = {type, 0, name};
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    if (found == NULL) {
        PyErr_Clear();
        return field;
    }
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) && PyType_IsSubtype(type, PyDescr_TYPE(found))) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type == T_OBJECT_EX) field.offset = member->offset;
    }
    Py_DECREF(found);
    return field;
}

static PyObject *get(const Field *field, PyObject *object) {
    if (field->offset && Py_IS_TYPE(object, field->type)) {
        PyObject *value = *(PyObject **)((char *)object + field->offset);
        if (value != NULL) return Py_NewRef(value);
    }
    return PyObject_GetAttr(object, field->name);
}

/* ---- exceptions as values ---------------------------------------------------------------------------------------- */

/* The exception that is set, cleared; NULL, and it stays set, for one that is no Exception (an interrupt). */
static PyObject *caught(void) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) PyException_SetTraceback(value, trace);
    Py_XDECREF(trace);
    Py_XDECREF(type);
    return value;
#endif
}

/* ---- records_of(messages, record_type) --------------------------------------------------------------------------- */

typedef struct {
    PyTypeObject *type;      /* of messages that have these */
    PyCFunction call[NAMES]; /* NULL: by name */
    Py_ssize_t timestamp;    /* its place in the object; 0: it is asked for */
} Getters;

static PyObject *ask(const Getters *getters, PyObject *message, enum name which) {
    if (getters->call[which] != NULL && Py_IS_TYPE(message, getters->type)) return getters->call[which](message, NULL);
    return PyObject_CallMethodNoArgs(message, names[which]);
}

static PyObject *asked_timestamp(const Getters *getters, PyObject *message) {
    PyObject *pair = ask(getters, message, TIMESTAMP);
    if (pair == NULL) return NULL;
    PyObject *timestamp = PySequence_GetItem(pair, 1);
    Py_DECREF(pair);
    return timestamp;
}

static long long number_at(PyObject *object, Py_ssize_t place) {
    long long number;
    memcpy(&number, (char *)object + place, sizeof(number));
    return number;
}

/* A Message with this timestamp; NULL, and no exception is set: this type cannot be made so. */
static PyObject *message_of_time(PyTypeObject *type, long long timestamp) {
    PyObject *named = Py_BuildValue("{s(iL)}", texts[TIMESTAMP], 1, timestamp), *message = NULL;
    if (named != NULL) message = PyObject_Call((PyObject *)type, empty, named);
    Py_XDECREF(named);
    PyErr_Clear();
    return message;
}

/* The only place at which a Message holds the timestamp that it was made with; 0 if there is none.
 *
 * Message.timestamp() makes a tuple of two numbers, which takes a quarter of the time of a whole Record. */
static Py_ssize_t place_of_timestamp(PyTypeObject *type) {
    const long long timestamp = 0x0123456789ABCDEF; /* nothing else in it is like this */
    PyObject *message = message_of_time(type, timestamp);
    if (message == NULL) return 0;
    Py_ssize_t found = 0, places = 0, last = Py_TYPE(message)->tp_basicsize - (Py_ssize_t)sizeof(timestamp);
    for (Py_ssize_t place = sizeof(PyObject); place <= last; place += sizeof(int)) {
        if (number_at(message, place) != timestamp) continue;
        found = place;
        places++;
    }
    Py_DECREF(message);
    return places == 1 ? found : 0;
}

/* The place, measured when a type is not the one before, if it says of this message what the getter says (a later
 * client's may do more than read it). */
static Py_ssize_t timestamp_in(const Getters *getters, PyObject *message) {
    static PyTypeObject *measured; /* never freed: a type of C's own */
    static Py_ssize_t place;
    if (measured != getters->type) {
        place = place_of_timestamp(getters->type);
        measured = getters->type;
    }
    if (!place) return 0;
    long long there = number_at(message, place);
    PyObject *asked = asked_timestamp(getters, message);
    int same = asked != NULL && PyLong_CheckExact(asked) && PyLong_AsLongLong(asked) == there;
    Py_XDECREF(asked);
    PyErr_Clear();
    return same ? place : 0;
}

/* Whether it is defined in C and is this type's own, not inherited: then no code of Python's runs in making one. */
static int is_clients_own(PyTypeObject *type, PyObject *getter) {
    return !PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) && PyDescr_TYPE(getter) == type;
}

static Getters getters_of(PyObject *message) {
    Getters getters = {Py_TYPE(message), {NULL}, 0};
    int measurable = 0;
    for (int i = 0; i < NAMES; i++) {
        PyObject *found = PyObject_GetAttr((PyObject *)getters.type, names[i]);
        if (found == NULL) {
            PyErr_Clear();
        } else if (Py_IS_TYPE(found, &PyMethodDescr_Type)) {
            const PyMethodDef *method = ((PyMethodDescrObject *)found)->d_method;
            if (method->ml_flags == METH_NOARGS) getters.call[i] = method->ml_meth;
            if (i == TIMESTAMP) measurable = getters.call[i] != NULL && is_clients_own(getters.type, found);
        }
        Py_XDECREF(found);
    }
    if (measurable) getters.timestamp = timestamp_in(&getters, message);
    return getters;
}

static PyObject *timestamp_of(const Getters *getters, PyObject *message) {
    if (getters->timestamp && Py_IS_TYPE(message, getters->type))
        return PyLong_FromLongLong(number_at(message, getters->timestamp));
    return asked_timestamp(getters, message);
}

static PyObject *headers_of(const Getters *getters, PyObject *message) {
    PyObject *headers = ask(getters, message, HEADERS);
    if (headers == NULL) return NULL;
    int some = PyObject_IsTrue(headers);
    if (some > 0) return headers;
    Py_DECREF(headers);
    return some < 0 ? NULL : Py_NewRef(empty);
}

typedef struct {
    PyObject *type;
    int fills;            /* whether a record is made by filling `fields`; else the type is called */
    Field fields[FIELDS]; /* in the order of `names` */
} Maker;

/* Whether `record`, for which the type was called with these values, is what filling its fields would have made. */
static int is_filled(Maker *maker, PyObject *record, PyObject *const *values) {
    PyTypeObject *type = Py_TYPE(record);
    if ((PyObject *)type != maker->type) return 0;
    /* Classes of Python's own, which may do more in making one, are all seen by the collector; a Struct need not be. */
    if (PyType_IS_GC(type) || PyObject_HasAttrString(maker->type, "__post_init__")) return 0;
    for (int i = 0; i < FIELDS; i++) {
        maker->fields[i] = field_of(type, names[i]);
        Py_ssize_t offset = maker->fields[i].offset;
        if (!offset || *(PyObject **)((char *)record + offset) != values[i]) return 0;
    }
    return type->tp_basicsize == (Py_ssize_t)(sizeof(PyObject) + FIELDS * sizeof(PyObject *)); /* and no more fields */
}

static PyObject *filled(const Maker *maker, PyObject *const *values) {
    PyTypeObject *type = (PyTypeObject *)maker->type;
    PyObject *record = type->tp_alloc(type, 0);
    for (int i = 0; record != NULL && i < FIELDS; i++)
        *(PyObject **)((char *)record + maker->fields[i].offset) = Py_NewRef(values[i]);
    return record;
}

static PyObject *called(Maker *maker, PyObject *const *values) {
    PyObject *record = PyObject_Vectorcall(maker->type, values, FIELDS, NULL);
    maker->fills = record != NULL && is_filled(maker, record, values);
    return record;
}

static PyObject *value_of(const Getters *getters, PyObject *message, enum name which) {
    if (which == TIMESTAMP) return timestamp_of(getters, message);
    if (which == HEADERS) return headers_of(getters, message);
    return ask(getters, message, which);
}

static PyObject *record_of(const Getters *getters, PyObject *message, Maker *maker) {
    PyObject *values[FIELDS], *record = NULL;
    int known = 0;
    while (known < FIELDS && (values[known] = value_of(getters, message, known)) != NULL) known++;
    if (known == FIELDS) record = maker->fills ? filled(maker, values) : called(maker, values);
    while (known) Py_DECREF(values[--known]);
    return record;
}

static PyObject *records_of(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "records_of takes 2 arguments");
    PyObject *messages = PySequence_Fast(args[0], "messages");
    if (messages == NULL) return NULL;
    PyObject *records = PyList_New(0);
    if (records == NULL || PySequence_Fast_GET_SIZE(messages) == 0) {
        Py_DECREF(messages);
        return records;
    }
    PyObject *first = Py_NewRef(PySequence_Fast_GET_ITEM(messages, 0)); /* keeps its type, which `getters` is about */
    const Getters getters = getters_of(first);
    Maker maker = {args[1], 0, {{0}}};
    for (Py_ssize_t i = 0; records != NULL && i < PySequence_Fast_GET_SIZE(messages); i++) {
        PyObject *message = Py_NewRef(PySequence_Fast_GET_ITEM(messages, i));
        PyObject *error = ask(&getters, message, ERROR);
        if (error == Py_None) {
            PyObject *record = record_of(&getters, message, &maker);
            if (record == NULL || PyList_Append(records, record) < 0) Py_CLEAR(records);
            Py_XDECREF(record);
        } else if (error == NULL) {
            Py_CLEAR(records);
        }
        Py_XDECREF(error);
        Py_DECREF(message);
    }
    Py_DECREF(first);
    Py_DECREF(messages);
    return records;
}

/* ---- producing --------------------------------------------------------------------------------------------------- */

enum { SHORT = 3, LONG = 7, LONGEST = 8 }; /* how many arguments `produce` is given */

/* function(*args). The client's `produce`, which takes a tuple, is called as C: that saves a tenth of its time. */
static PyObject *call_produce(PyObject *function, PyObject *const *args, Py_ssize_t given) {
    if (!PyCFunction_CheckExact(function) || PyCFunction_GET_FLAGS(function) != (METH_VARARGS | METH_KEYWORDS))
        return PyObject_Vectorcall(function, args, given, NULL);
    PyObject *tuple = PyTuple_New(given);
    if (tuple == NULL) return NULL;
    for (Py_ssize_t i = 0; i < given; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    PyCFunctionWithKeywords call = (PyCFunctionWithKeywords)(void (*)(void))PyCFunction_GET_FUNCTION(function);
    PyObject *result = call(PyCFunction_GET_SELF(function), tuple, NULL);
    Py_DECREF(tuple);
    if (result == NULL && !PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "no result and no exception");
    return result;
}

/* produce(topic, value, key[, -1, None, None, timestamp[, headers]]); what it raises goes to refused(error, send).
 * -1: raised. */
static int put(
    PyObject *produce, PyObject *refused, PyObject *topic, PyObject *value, PyObject *key, PyObject *timestamp,
    PyObject *headers
) {
    PyObject *const args[LONGEST] = {topic, value, key, minus_one, Py_None, Py_None, timestamp, headers};
    PyObject *result = call_produce(produce, args, timestamp == NULL ? SHORT : headers == NULL ? LONG : LONGEST);
    if (result == NULL) {
        PyObject *error = caught();
        if (error == NULL) return -1;
        PyObject *sent_at = timestamp == NULL ? zero : timestamp;
        PyObject *send = PyTuple_Pack(6, topic, value, key, minus_one, sent_at, headers == NULL ? Py_None : headers);
        if (send != NULL) {
            result = PyObject_CallFunctionObjArgs(refused, error, send, NULL);
            Py_DECREF(send);
        }
        Py_DECREF(error);
    }
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* ---- feed_values(records, function, decode, topic, produce, refused, other[, passing]) ----------------------------- */

typedef struct {
    PyObject *function, *decode, *topic, *produce, *refused, *other, *passing;
    Field key, timestamp, value, headers;
} Values;

static PyObject *given_of(const Values *to, PyObject *record) {
    if (to->decode == Py_None) return Py_NewRef(record);
    PyObject *value = get(&to->value, record);
    if (value == NULL) return NULL;
    PyObject *given = PyObject_CallOneArg(to->decode, value);
    Py_DECREF(value);
    return given;
}

/* Those of `headers` whose names are in `passing`: a list, None without one, NULL: raised. */
static PyObject *passed_of(PyObject *headers, PyObject *passing) {
    PyObject *pairs = PySequence_Fast(headers, "headers"), *passed = pairs == NULL ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; passed != NULL && i < PySequence_Fast_GET_SIZE(pairs); i++) {
        PyObject *pair = Py_NewRef(PySequence_Fast_GET_ITEM(pairs, i)), *name = PySequence_GetItem(pair, 0);
        int wanted = name == NULL ? -1 : PySequence_Contains(passing, name);
        if (wanted < 0 || (wanted && PyList_Append(passed, pair) < 0)) Py_CLEAR(passed);
        Py_XDECREF(name);
        Py_DECREF(pair);
    }
    Py_XDECREF(pairs);
    if (passed != NULL && !PyList_GET_SIZE(passed)) Py_SETREF(passed, Py_NewRef(Py_None));
    return passed;
}

/* Into `*passed`: what of the record's headers is passed on, NULL when that is none of them. -1: raised. */
static int pass_on(const Values *to, PyObject *record, PyObject **passed) {
    PyObject *headers = get(&to->headers, record);
    if (headers == NULL) return -1;
    int done = 0;
    if (headers != empty) {
        *passed = passed_of(headers, to->passing);
        done = *passed == NULL ? -1 : 0;
        if (*passed == Py_None) Py_CLEAR(*passed);
    }
    Py_DECREF(headers);
    return done;
}

static int put_value(const Values *to, PyObject *record, PyObject *value) {
    PyObject *timestamp = get(&to->timestamp, record), *key = NULL, *passed = NULL;
    int known = timestamp == NULL ? -1 : PyObject_RichCompareBool(timestamp, zero, Py_GT);
    int done = -1;
    if (known >= 0 && (to->passing == NULL || pass_on(to, record, &passed) == 0) &&
        (key = get(&to->key, record)) != NULL)
        done = put(to->produce, to->refused, to->topic, value, key, known ? timestamp : zero, passed);
    Py_XDECREF(timestamp);
    Py_XDECREF(key);
    Py_XDECREF(passed);
    return done;
}

static int is_tombstone(const Values *to, PyObject *record) {
    PyObject *value = get(&to->value, record);
    if (value == NULL) return -1;
    int answer = value == Py_None;
    Py_DECREF(value);
    return answer;
}

/* How many outputs the record has led to; -1: raised. */
static Py_ssize_t feed_value(const Values *to, PyObject *record) {
    PyObject *given = given_of(to, record);
    if (given == NULL) return -1;
    PyObject *result = PyObject_CallOneArg(to->function, given);
    Py_DECREF(given);
    if (result == NULL) return -1;
    Py_ssize_t sent = 0;
    if (PyBytes_CheckExact(result) && to->topic != Py_None) {
        sent = put_value(to, record, result) < 0 ? -1 : 1;
    } else {
        int unusual = result == Py_None ? is_tombstone(to, record) : 1;
        PyObject *number = unusual > 0 ? PyObject_CallFunctionObjArgs(to->other, record, result, NULL) : NULL;
        if (unusual) sent = number == NULL ? -1 : PyLong_AsSsize_t(number);
        Py_XDECREF(number);
    }
    Py_DECREF(result);
    return sent;
}

static PyObject *feed_values(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 7 && count != 8) return PyErr_Format(PyExc_TypeError, "feed_values takes 7 or 8 arguments");
    PyObject *records = PySequence_Fast(args[0], "records");
    if (records == NULL) return NULL;
    PyObject *passing = count == 8 && args[7] != Py_None ? args[7] : NULL;
    Values to = {args[1], args[2], args[3], args[4], args[5], args[6], passing, {0}, {0}, {0}, {0}};
    if (PySequence_Fast_GET_SIZE(records)) {
        PyTypeObject *type = Py_TYPE(PySequence_Fast_GET_ITEM(records, 0));
        to.key = field_of(type, names[KEY]);
        to.timestamp = field_of(type, names[TIMESTAMP]);
        to.value = field_of(type, names[VALUE]);
        to.headers = field_of(type, names[HEADERS]);
    }
    Py_ssize_t sent = 0, i = 0;
    PyObject *error = NULL;
    for (; i < PySequence_Fast_GET_SIZE(records); i++) {
        PyObject *record = Py_NewRef(PySequence_Fast_GET_ITEM(records, i));
        Py_ssize_t more = feed_value(&to, record);
        Py_DECREF(record);
        if (more < 0 && PyErr_Occurred()) {
            error = caught();
            if (error == NULL) {
                Py_DECREF(records);
                return NULL;
            }
            break;
        }
        sent += more;
    }
    Py_DECREF(records);
    return error == NULL ? Py_BuildValue("nnO", sent, i, Py_None) : Py_BuildValue("nnN", sent, i, error);
}

/* ---- runs_of(records) -------------------------------------------------------------------------------------------- */

/* Whether `value`, which is taken over, is `*last`, which it becomes: 1, 0, or -1: raised. */
static int is_last(PyObject **last, PyObject *value) {
    if (value == NULL) return -1;
    int answer = *last == NULL ? 0 : *last == value ? 1 : PyObject_RichCompareBool(value, *last, Py_EQ);
    Py_XSETREF(*last, value);
    return answer;
}

/* `value`, which is taken over, as a number: 0, or -1: raised. */
static int number_of(PyObject *value, long long *number) {
    if (value == NULL) return -1;
    *number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *runs_of(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 1 || !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "runs_of takes a list");
    PyObject *records = args[0], *runs = PyList_New(0), *topic = NULL, *partition = NULL;
    long long last = 0;
    if (runs == NULL || !PyList_GET_SIZE(records)) return runs;
    PyTypeObject *type = Py_TYPE(PyList_GET_ITEM(records, 0));
    const Field topics = field_of(type, names[TOPIC]), partitions = field_of(type, names[PARTITION]);
    const Field offsets = field_of(type, names[OFFSET]);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records) && runs != NULL; i++) {
        PyObject *record = Py_NewRef(PyList_GET_ITEM(records, i));
        int same_topic = is_last(&topic, get(&topics, record));
        int same_partition = same_topic < 0 ? -1 : is_last(&partition, get(&partitions, record));
        long long before = last;
        int known = same_partition < 0 ? -1 : number_of(get(&offsets, record), &last);
        Py_DECREF(record);
        if (same_topic > 0 && same_partition > 0 && known >= 0 && last > before) continue;
        PyObject *at = known < 0 ? NULL : PyLong_FromSsize_t(i);
        if (at == NULL || PyList_Append(runs, at) < 0) Py_CLEAR(runs);
        Py_XDECREF(at);
    }
    Py_XDECREF(topic);
    Py_XDECREF(partition);
    return runs;
}

/* ---- all_plain(outs, out_type), put_plain(outs, topic, produce, refused) ------------------------------------------ */

typedef struct {
    Field value, key, topic, partition, headers, timestamp;
} Plain;

static Plain plain_of(PyTypeObject *type) {
    Plain plain = {
        field_of(type, names[VALUE]), field_of(type, names[KEY]), field_of(type, names[TOPIC]),
        field_of(type, names[PARTITION]), field_of(type, names[HEADERS]), field_of(type, names[TIMESTAMP]),
    };
    return plain;
}

static int is_bytes(PyObject *value) { return PyBytes_CheckExact(value); }
static int is_key(PyObject *key) { return key == Py_None || PyBytes_CheckExact(key); }
static int is_none(PyObject *value) { return value == Py_None; }
static int is_empty(PyObject *headers) { return headers == empty; }

static int is_time(PyObject *timestamp) {
    if (!PyLong_CheckExact(timestamp)) return 0;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(timestamp, &overflow);
    return !overflow && number >= 0;
}

/* 1 and 0 as `fits` says of the field, -1: raised. */
static int check(const Field *field, PyObject *out, int (*fits)(PyObject *)) {
    PyObject *value = get(field, out);
    if (value == NULL) return -1;
    int answer = fits(value);
    Py_DECREF(value);
    return answer;
}

static int is_plain(const Plain *plain, PyObject *out) {
    const struct { const Field *field; int (*fits)(PyObject *); } rules[] = {
        {&plain->value, is_bytes}, {&plain->key, is_key}, {&plain->topic, is_none},
        {&plain->partition, is_none}, {&plain->headers, is_empty},
        {&plain->timestamp, is_time},
    };
    for (size_t i = 0; i < COUNT_OF(rules); i++) {
        int answer = check(rules[i].field, out, rules[i].fits);
        if (answer <= 0) return answer;
    }
    return 1;
}

static PyObject *all_plain(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(args[0]) || !PyType_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "all_plain takes a list and a type");
    PyObject *outs = args[0];
    PyTypeObject *type = (PyTypeObject *)args[1];
    const Plain plain = plain_of(type);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outs); i++) {
        PyObject *out = Py_NewRef(PyList_GET_ITEM(outs, i));
        int answer = Py_IS_TYPE(out, type) ? is_plain(&plain, out) : 0;
        Py_DECREF(out);
        if (answer < 0) return NULL;
        if (!answer) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static int put_out(const Plain *plain, PyObject *out, PyObject *const *args) {
    PyObject *topic = args[1], *produce = args[2], *refused = args[3];
    PyObject *value = get(&plain->value, out), *key = NULL, *timestamp = NULL;
    int done = -1;
    if (value != NULL && (key = get(&plain->key, out)) != NULL && (timestamp = get(&plain->timestamp, out)) != NULL)
        done = put(produce, refused, topic, value, key, timestamp == zero ? NULL : timestamp, NULL);
    Py_XDECREF(value);
    Py_XDECREF(key);
    Py_XDECREF(timestamp);
    return done;
}

static PyObject *put_plain(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 4 || !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "put_plain takes a list and 3 more");
    PyObject *outs = args[0];
    if (!PyList_GET_SIZE(outs)) return Py_BuildValue("nO", (Py_ssize_t)0, Py_None);
    const Plain plain = plain_of(Py_TYPE(PyList_GET_ITEM(outs, 0)));
    Py_ssize_t i = 0;
    /* The list is the application's: its size is looked at anew each time. */
    for (; i < PyList_GET_SIZE(outs); i++) {
        PyObject *out = Py_NewRef(PyList_GET_ITEM(outs, i));
        int done = put_out(&plain, out, args);
        Py_DECREF(out);
        if (done < 0) {
            PyObject *error = caught();
            return error == NULL ? NULL : Py_BuildValue("nN", i, error);
        }
    }
    return Py_BuildValue("nO", i, Py_None);
}

/* ---- the module -------------------------------------------------------------------------------------------------- */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, "As in eos/hotloop/python.py."}
static PyMethodDef functions[] = {
    FUNCTION(records_of), FUNCTION(feed_values), FUNCTION(all_plain), FUNCTION(put_plain), FUNCTION(runs_of),
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    for (int i = 0; i < NAMES; i++)
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return NULL;
    empty = PyTuple_New(0);
    zero = PyLong_FromLong(0);
    minus_one = PyLong_FromLong(-1);
    if (empty == NULL || zero == NULL || minus_one == NULL) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    PyObject *source = PyLong_FromLongLong(EOS_SOURCE); // of build.py: source.py's checksum of this file
    int added = source == NULL ? -1 : PyModule_AddObjectRef(made, "SOURCE", source);
    Py_XDECREF(source);
    if (added < 0) Py_CLEAR(made);
    return made;
}
